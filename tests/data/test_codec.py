"""Prompts and images to tokens and back."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
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
        (TEXT, "cab", "'b' is not in the text that the model learned from"),
        (TEXT, "caf\u00e8", "'è' is not in the text"),
        (PICTURE, "3", "prompt='3': this model writes pictures; complete one with --image"),
        (TOKENS, "a", "prompt='a': this model writes tokens; must be numbers of 0..8"),
        (TOKENS, "1 9", "must be numbers of 0..8"),
        (TOKENS, "-1", "must be numbers of 0..8"),
        (TOKENS, " ", "must be numbers of 0..8"),
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


def test_dark_ink_turns_images_and_pictures_around(tmp_path: Path):
    inked = TokenCodec(vocab_size=4, start_token=0, picture=PICTURE.picture, dark_ink=True)
    Image.fromarray(np.zeros((2, 3), np.uint8)).save(tmp_path / "black.png")
    tokens = inked.encode_image(tmp_path / "black.png")
    assert tokens.tolist() == [3] * 6
    assert (inked.decode_images(tokens[None]) == 0).all()
    assert (PICTURE.decode_images(tokens[None]) == 255).all()


def test_images_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(MemtrainError, match="bad.png: cannot be read as an image"):
        PICTURE.encode_image(tmp_path / "bad.png")
    with pytest.raises(MemtrainError, match="gone.png: no such image"):
        PICTURE.encode_image(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(MemtrainError, match="pipe.png: is not a regular file"):
        PICTURE.encode_image(tmp_path / "pipe.png")
    with pytest.raises(MemtrainError, match="writes text; begin one with --prompt"):
        TEXT.encode_image(tmp_path / "bad.png")
    with pytest.raises(MemtrainError, match="no pictures"):
        TOKENS.decode_images(np.zeros((1, 2), np.int64))


def test_tokens_are_read_as_numbers():
    assert TOKENS.decode_text(np.array([3, 1, 4])) == "3 1 4"
