"""Prompts and images to tokens and back."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from memtrain.data.codec import TokenCodec, decode_text, encode_text
from memtrain.data.images import ImageFormat
from memtrain.data.prepare.text_files import _Joined
from memtrain.errors import MemtrainError

TEXT = TokenCodec(vocab_size=256, start_token=10, text=True, alphabet=tuple("café \n".encode()))
PICTURE = TokenCodec(vocab_size=4, start_token=0, picture=ImageFormat(height=2, width=3, levels=4))
TOKENS = TokenCodec(vocab_size=9, start_token=0)


def test_a_prompt_is_its_bytes():
    tokens = TEXT.encode_text("café")
    assert tokens.tolist() == list("café".encode())
    assert TEXT.decode_text(tokens) == "café"


def test_a_prompt_of_tokens_is_written_as_they_are_shown():
    tokens = TOKENS.encode_text("3 0 8")
    assert tokens.tolist() == [3, 0, 8] and TOKENS.decode_text(tokens) == "3 0 8"


@pytest.mark.parametrize(
    ("spelling", "prompt", "message"),
    [
        (TEXT, "", "prompt='': must hold a character"),
        (TEXT, "cab", "'b' does not occur in the training text"),
        (TEXT, "caf\u00e8", "'è' does not occur"),
        (PICTURE, "3", "prompt='3': this model generates images; complete one with its first"),
        (TOKENS, "a", "prompt='a': this model generates tokens; must be numbers 0..8"),
        (TOKENS, "1 9", "must be numbers 0..8"),
        (TOKENS, "-1", "must be numbers 0..8"),
        (TOKENS, " ", "must be numbers 0..8"),
    ],
)
def test_a_bad_prompt_is_one_line(spelling: TokenCodec, prompt: str, message: str):
    with pytest.raises(MemtrainError) as caught:
        spelling.encode_text(prompt)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_image_is_resized_and_takes_the_datas_levels(tmp_path: Path):
    gray = np.array([[0, 85, 170], [255, 85, 0]], np.uint8)
    Image.fromarray(gray).save(tmp_path / "same.png")
    assert PICTURE.encode_image(tmp_path / "same.png").tolist() == [0, 1, 2, 3, 1, 0]
    Image.fromarray(np.full((40, 60), 255, np.uint8)).save(tmp_path / "large.png")
    assert PICTURE.encode_image(tmp_path / "large.png").tolist() == [3] * 6


CLASSES = TokenCodec(
    vocab_size=7,
    start_token=4,
    start_written=False,
    picture=PICTURE.picture,
    classes=("cat", "dog", "1"),
    class_counts=(6, 0, 2),
)


def test_classes_follow_the_tokens_of_images():
    assert CLASSES.writable == 4
    assert [CLASSES.class_number(label) for label in ("cat", "dog", "0", 2, "2")] == [0, 1, 0, 2, 2]
    assert CLASSES.class_number("1") == 2  # a name comes before a number
    images = np.array([[4, 0, 1, 2, 3, 0, 1], [6, 3, 3, 3, 3, 3, 3]])
    labels, pixels = CLASSES.split_class(images)
    assert labels is not None and labels.tolist() == [0, 2] and pixels.shape == (2, 6)
    assert np.array_equal(CLASSES.decode_images(images), CLASSES.decode_images(pixels))
    assert CLASSES.split_class(pixels)[0] is None and PICTURE.split_class(pixels)[0] is None


def test_classes_are_sampled_with_their_frequencies():
    drawn = np.bincount(CLASSES.sample_classes(4000, seed=0), minlength=3)
    assert drawn[1] == 0 and abs(drawn[0] / 4000 - 0.75) < 0.03
    assert np.array_equal(CLASSES.sample_classes(9, seed=5), CLASSES.sample_classes(9, seed=5))


@pytest.mark.parametrize(
    ("codec", "label", "message"),
    [
        (CLASSES, "cta", "label='cta': did you mean cat? (one of 1, cat, dog), or 0..2"),
        (CLASSES, 3, "label='3': must be one of 1, cat, dog, or 0..2"),
        (CLASSES, "-1", "label='-1': did you mean 1? (one of 1, cat, dog), or 0..2"),
        (PICTURE, "cat", "label='cat': this model has no classes; train on images with --option"),
    ],
)
def test_an_unknown_class_is_one_line(codec: TokenCodec, label: str | int, message: str):
    with pytest.raises(MemtrainError) as caught:
        codec.class_number(label)
    assert message in str(caught.value)


def test_classes_need_their_counts_and_a_start_that_is_not_written():
    for wrong in ({"class_counts": (1,)}, {"start_written": True}):
        with pytest.raises(MemtrainError, match="classes: need start_written=False"):
            replace(CLASSES, **wrong)


def test_an_image_in_colour_is_encoded_by_the_palette(tmp_path: Path):
    image = ImageFormat(height=1, width=2, levels=2, palette=((0, 0, 200), (255, 255, 255)))
    codec = TokenCodec(vocab_size=2, start_token=0, picture=image)
    Image.fromarray(np.array([[[0, 0, 255, 255], [9, 9, 9, 0]]], np.uint8)).save(tmp_path / "a.png")
    tokens = codec.encode_image(tmp_path / "a.png")
    assert tokens.tolist() == [0, 1]  # transparent is white
    assert codec.decode_images(tokens[None]).tolist() == [[[[0, 0, 200], [255, 255, 255]]]]


def test_dark_ink_inverts_images(tmp_path: Path):
    inked = TokenCodec(vocab_size=4, start_token=0, picture=PICTURE.picture, dark_ink=True)
    Image.fromarray(np.zeros((2, 3), np.uint8)).save(tmp_path / "black.png")
    tokens = inked.encode_image(tmp_path / "black.png")
    assert tokens.tolist() == [3] * 6
    assert (inked.decode_images(tokens[None]) == 0).all()
    assert (PICTURE.decode_images(tokens[None]) == 255).all()


def test_invalid_images_are_refused(tmp_path: Path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(MemtrainError, match="bad.png: cannot be read as an image"):
        PICTURE.encode_image(tmp_path / "bad.png")
    with pytest.raises(MemtrainError, match="gone.png: no such image"):
        PICTURE.encode_image(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(MemtrainError, match="pipe.png: is not a regular file"):
        PICTURE.encode_image(tmp_path / "pipe.png")
    with pytest.raises(MemtrainError, match="generates text; begin one with --prompt"):
        TEXT.encode_image(tmp_path / "bad.png")
    with pytest.raises(MemtrainError, match="are not images"):
        TOKENS.decode_images(np.zeros((1, 2), np.int64))


def test_tokens_are_read_as_numbers():
    assert TOKENS.decode_text(np.array([3, 1, 4])) == "3 1 4"


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


def test_a_separator_token_separates_stories():
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
def test_only_whole_lines_separate_and_empty_stories_are_dropped(raw: bytes, expected: list[bytes]):
    assert documents(raw) == expected


def test_empty_text_has_no_tokens():
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
def test_documents_round_trip(parts: list[bytes], separator: bool):
    joined = _Joined("text")
    for part in parts:
        joined.begin()
        joined.write(part)
    found = documents(joined.raw, separator=separator)
    glue = b"\0" if separator else b""
    ended = [part if part.endswith(b"\n") else part + b"\n" for part in parts[:-1]]
    assert found == [part + glue for part in ended] + parts[-1:]


# -------------------------------------------------------------------------------------- decoding


def test_invalid_utf8_is_replaced():
    assert decode_text(np.array([104, 105, 255])) == "hi\N{REPLACEMENT CHARACTER}"
    assert decode_text(np.array([], np.int64)) == ""


@pytest.mark.parametrize("token", [256, -1])
def test_tokens_beyond_bytes_are_refused(token: int):
    with pytest.raises(MemtrainError, match="are not text"):
        decode_text(np.array([65, token]))
