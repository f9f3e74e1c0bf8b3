"""What tokens spell, text or pictures, and how a sequence of them begins."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cattrs
import numpy as np
from cattrs.v import format_exception
from jaxtyping import Int64, Integer, UInt8

from memtrain.data.images import ImageFormat, decode_images, encode_images
from memtrain.data.prepare.image_files import read_image
from memtrain.data.text import decode_text
from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCodec:
    """All that generation asks of the data: it goes with the weights of a pretrained model."""

    vocab_size: int
    start_token: int
    """What is read before the first written token."""
    start_written: bool = True
    """Whether the start token is part of what is written; else it is a mark of its own, which
    stands before every prompt and is never written."""
    text: bool = False
    """Whether tokens are the bytes of a text."""
    picture: ImageFormat | None = None
    """How a sequence spells a picture, if it does."""
    dark_ink: bool = False
    """Whether a higher grey level is darker."""
    alphabet: tuple[int, ...] = ()
    """The tokens that the training text holds (text only)."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_token < self.vocab_size:
            raise MemtrainError(
                f"start_token={self.start_token}: must be below vocab_size, {self.vocab_size}"
            )

    @property
    def writable(self) -> int:
        """Only tokens below this number may be written."""
        return self.vocab_size if self.start_written else self.start_token

    def encode_text(self, prompt: str) -> Int64[np.ndarray, " P"]:
        """A prompt as tokens; of a model that writes neither text nor pictures, its numbers.

        Raises:
            MemtrainError: the model writes pictures, or a character is none that it ever read.
        """
        if self.picture:
            raise MemtrainError(
                f"prompt={_brief(prompt)}: this model writes pictures; complete one with "
                "--image FILE"
            )
        if not self.text:
            return self._read_numbers(prompt)
        if not prompt:
            raise MemtrainError("prompt='': must hold a character; leave it off to begin freely")
        for character in prompt:
            if self.alphabet and not set(character.encode()) <= set(self.alphabet):
                raise MemtrainError(
                    f"prompt={_brief(prompt)}: {character!r} is not in the text that the model "
                    "learned from; leave it out"
                )
        return np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)

    def _read_numbers(self, prompt: str) -> Int64[np.ndarray, " P"]:
        words = prompt.split()
        if not words or not all(
            word.isdecimal() and len(word) < 9 and int(word) < self.writable for word in words
        ):
            raise MemtrainError(
                f"prompt={_brief(prompt)}: this model writes tokens; must be numbers of "
                f"0..{self.writable - 1} with spaces between them"
            )
        return np.array([int(word) for word in words], np.int64)

    def encode_image(self, path: Path) -> Int64[np.ndarray, " L"]:
        """An image file as the tokens of one picture, resized to the data's size."""
        picture = self.picture
        if picture is None:
            what = "text; begin one with --prompt" if self.text else "tokens"
            raise MemtrainError(f"image={path}: this model writes {what}")
        gray = read_image(path, (picture.height, picture.width))
        gray = 255 - gray if self.dark_ink else gray
        tokens = encode_images(gray[None], levels=picture.levels, patch=picture.patch)
        return tokens[0].astype(np.int64)

    def decode_text(self, tokens: Integer[np.ndarray, " N"]) -> str:
        """What a person reads: the text, or the tokens as numbers."""
        return decode_text(tokens) if self.text else " ".join(map(str, tokens.tolist()))

    def decode_images(self, tokens: Integer[np.ndarray, "N L"]) -> UInt8[np.ndarray, "N H W"]:
        """Grey pictures, 0 black."""
        if self.picture is None:
            raise MemtrainError("these tokens spell no pictures")
        gray = decode_images(tokens, self.picture)
        return 255 - gray if self.dark_ink else gray


def read_codec(plain: Any, source: str) -> TokenCodec:
    """A spelling from what `asdict` made of it, after its way through JSON.

    Raises:
        MemtrainError: it is none; the message begins with the source.
    """
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(plain, TokenCodec)
    except cattrs.BaseValidationError as error:
        reason = cattrs.transform_error(error, format_exception=_explain)[0]
        raise MemtrainError(f"{source}: spelling: {reason}") from None


def _explain(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, MemtrainError) else format_exception(error, kind)


def _brief(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 20 else f"{prompt[:17]}...")
