"""Text of a choice: stop strings end it, wherever tokens end; probabilities are those of tokens."""

import pytest
import torch

from memtrain.data.codec import TokenCodec
from memtrain.deploy.server.text import ChoiceText, score, token_text

TEXT = TokenCodec(vocab_size=256, start_token=10, text=True)
TOKENS = TokenCodec(vocab_size=9, start_token=0)


def written(text: str, *stops: str, codec: TokenCodec = TEXT) -> tuple[str, list[str], bool]:
    """The text, what each byte added to it, and whether it was stopped."""
    choice, parts = ChoiceText(codec, stops), []
    for byte in text.encode():
        parts.append(choice.add(byte))
        if choice.stopped:
            break
    parts.append(choice.finish())
    return "".join(parts), parts, choice.stopped


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one. two. three", (". t",), "one"),
        ("ababac", ("abac",), "ab"),
        ("aab", ("ab", "aab"), ""),
        ("nothing", ("x", "ing!"), "nothing"),
        ("Käse ist gut", ("äs",), "K"),
        ("a", ("a",), ""),
        ("", ("a",), ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stops: tuple[str, ...], expected: str):
    found, parts, stopped = written(text, *stops)
    assert found == expected and stopped == (expected != text)
    # Nothing that was shown earlier is taken back.
    assert all(expected.startswith("".join(parts[:n])) for n in range(len(parts)))


def test_text_without_stops_is_shown_at_once_and_characters_whole():
    assert written("aé")[1] == ["a", "", "é", ""]
    assert written("ab", "bx")[1] == ["a", "", "b"]


def test_numbers_are_the_text_of_other_tokens():
    choice = ChoiceText(TOKENS, ())
    assert [choice.add(token) for token in (3, 5)] == ["3 ", "5 "]


def test_scores_are_log_probabilities_of_what_may_be_written():
    codec = TokenCodec(vocab_size=9, start_token=8, start_written=False)
    logits = torch.arange(9.0)
    found = score(codec, 6, logits, 2, 4)
    expected = logits[:8].log_softmax(0)
    assert found.logprob == float(expected[6]) and found.offset == 4 and found.token == "6"
    assert found.top == {"7": float(expected[7]), "6": float(expected[6])}
    assert score(codec, 6, None, 2, 0).logprob is None


def test_bytes_that_are_no_character_are_escaped():
    assert token_text(TEXT, 0x41) == "A" and token_text(TEXT, 0xC3) == "bytes:\\xc3"
