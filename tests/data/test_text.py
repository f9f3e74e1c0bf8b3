"""Text becomes bytes, bytes become tokens, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data.prepare.text_files import join_documents
from memtrain.data.text import decode_text, encode_text
from memtrain.errors import MemtrainError

STORIES = b"One cat.\n<|endoftext|>\nTwo dogs.\n<|endoftext|>\nThree.\n"


def documents(raw: bytes | bytearray, **options) -> list[bytes]:
    encoded = encode_text(raw, **options)
    return [part.tobytes() for part in np.split(encoded.tokens, encoded.starts[1:])]


# -------------------------------------------------------------------------------------- encoding


def test_bytes_keep_everything_and_ascii_drops_and_counts():
    raw = "né à 7 €".encode()
    kept = encode_text(raw, "bytes")
    assert kept.tokens.tobytes() == raw and (kept.dropped_bytes, kept.kept_bytes) == (0, 7)
    ascii_only = encode_text(raw, "ascii")
    assert ascii_only.tokens.tobytes() == b"n  7 "
    assert (ascii_only.dropped_characters, ascii_only.dropped_bytes) == (3, 7)
    assert ascii_only.kept_bytes == 0


def test_separator_lines_are_dropped_and_stories_keep_their_newline():
    encoded = encode_text(STORIES)
    assert encoded.tokens.tobytes() == b"One cat.\nTwo dogs.\nThree.\n"
    assert encoded.starts.tolist() == [0, 9, 19]


def test_a_separator_token_stands_between_stories():
    encoded = encode_text(STORIES, separator=True)
    assert encoded.tokens.tobytes() == b"One cat.\n\0Two dogs.\n\0Three.\n"
    assert encoded.starts.tolist() == [0, 10, 21]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"<|endoftext|>\na\n<|endoftext|>", [b"a\n"]),
        (b"a\n<|endoftext|>\n<|endoftext|>\nb", [b"a\n", b"b"]),
        (b"a\r\n<|endoftext|>\r\nb", [b"a\r\n", b"b"]),
        (b"a <|endoftext|>\nb", [b"a <|endoftext|>\nb"]),
        (b"<|endoftext|> b", [b"<|endoftext|> b"]),
    ],
    ids=["at the ends", "twice", "windows", "behind text", "before text"],
)
def test_only_whole_lines_separate_and_empty_stories_vanish(raw: bytes, expected: list[bytes]):
    assert documents(raw) == expected


def test_nothing_makes_no_tokens():
    encoded = encode_text(b"<|endoftext|>\n", separator=True)
    assert len(encoded.tokens) == 0 and len(encoded.starts) == 0


def test_a_text_that_holds_the_separator_token_is_refused():
    with pytest.raises(MemtrainError, match="holds byte 0 itself"):
        encode_text(b"a\0b", separator=True)
    assert encode_text(b"a\0b").tokens.tolist() == [97, 0, 98]


def test_an_unknown_mode_is_refused():
    with pytest.raises(MemtrainError, match="did you mean ascii"):
        encode_text(b"", "asci")


@given(st.text())
def test_any_text_survives_as_bytes(text: str):
    if "<|endoftext|>" not in text:
        assert decode_text(encode_text(text.encode()).tokens) == text


@given(st.text())
def test_ascii_mode_keeps_ascii_and_counts_the_rest(text: str):
    encoded = encode_text(text.encode(), "ascii")
    assert decode_text(encoded.tokens) == "".join(c for c in text if c.isascii())
    assert encoded.dropped_characters == sum(not c.isascii() for c in text)


ANY_DOCUMENT = st.binary(min_size=1).filter(lambda d: 0 not in d and b"<|endoftext|>" not in d)


@given(st.lists(ANY_DOCUMENT, min_size=1), st.booleans())
def test_any_documents_are_found_again(parts: list[bytes], separator: bool):
    found = documents(join_documents(parts), separator=separator)
    glue = b"\0" if separator else b""
    ended = [part if part.endswith(b"\n") else part + b"\n" for part in parts[:-1]]
    assert found == [part + glue for part in ended] + parts[-1:]


# -------------------------------------------------------------------------------------- decoding


def test_what_is_no_utf8_is_replaced():
    assert decode_text(np.array([104, 105, 255])) == "hi\N{REPLACEMENT CHARACTER}"
    assert decode_text(np.array([], np.int64)) == ""


@pytest.mark.parametrize("token", [256, -1])
def test_what_is_no_byte_is_refused(token: int):
    with pytest.raises(MemtrainError, match="are no text"):
        decode_text(np.array([65, token]))
