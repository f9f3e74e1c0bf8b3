"""Images as tokens and back, and data augmentation (horizontal flips and shifts)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer, UInt8, UInt16

from memtrain.errors import MemtrainError

MAX_TOKENS = 2**16
"""What 16 bits can name: 4x4 pixels of 2 levels, or 2x2 pixels of 16."""
MAX_PATCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFormat:
    """How the pictures of a data set are spelled.

    With more than two levels a pixel is a grey level, 0 black. With two levels it is ink, 1 dark
    and 0 light. A token is a pixel, or a patch x patch square of them: written in base `levels`,
    it is the square read left to right and top to bottom, so the first (highest) digit is the
    top left.
    """

    height: int
    width: int
    levels: int = 256
    patch: int = 1

    def __post_init__(self) -> None:
        for side in ("height", "width"):
            if getattr(self, side) < 1:
                raise MemtrainError(f"{side}={getattr(self, side)}: must be at least 1")
        if not 2 <= self.levels <= 256:
            raise MemtrainError(
                f"levels={self.levels}: must be 2..256; a pixel has 256 grey levels"
            )
        if not 1 <= self.patch <= MAX_PATCH:
            raise MemtrainError(f"patch={self.patch}: must be 1..{MAX_PATCH}")
        if self.vocab_size > MAX_TOKENS:
            raise MemtrainError(
                f"levels={self.levels} with patch={self.patch}: {self.vocab_size:,} tokens, at "
                f"most {MAX_TOKENS:,} can be told apart; set levels=2 or a smaller patch"
            )
        if self.height % self.patch or self.width % self.patch:
            raise MemtrainError(
                f"patch={self.patch}: must divide the picture, {self.height}x{self.width} "
                "(height x width); choose another size"
            )

    @property
    def vocab_size(self) -> int:
        return self.levels**self.patch**2

    @property
    def length(self) -> int:
        """Tokens of one picture."""
        return (self.height // self.patch) * (self.width // self.patch)


def encode_images(
    gray: UInt8[np.ndarray, "N H W"],
    *,
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
) -> UInt8[np.ndarray, "N L"] | UInt16[np.ndarray, "N L"]:
    """Spell grey pictures as tokens; see `Picture` for what a token means.

    Args:
        gray: 0 is black.
        levels: 2 binarises, 256 keeps every grey level, others take the nearest of `levels` greys.
        patch: side of the squares of pixels that make one token.
        threshold: with two levels only: darker than this is ink; 128 unless given.
    """
    count, height, width = gray.shape
    picture = ImageFormat(height=height, width=width, levels=levels, patch=patch)
    if levels > 2:
        if threshold is not None:
            raise MemtrainError(f"threshold={threshold} with levels={levels}: only for levels=2")
        did_you_mean = np.rint(np.arange(256) * ((levels - 1) / 255)).astype(np.uint8)
        pixels = did_you_mean[gray]
    else:
        threshold = 128 if threshold is None else threshold
        if not 1 <= threshold <= 255:
            raise MemtrainError(f"threshold={threshold}: must be 1..255; darker than it is ink")
        pixels = (gray < threshold).astype(np.uint8)
    if patch == 1:
        return pixels.reshape(count, picture.length)
    dtype = np.uint8 if picture.vocab_size <= 256 else np.uint16
    tokens = np.zeros((count, height // patch, width // patch), dtype)
    for row, column in _places(patch):
        tokens *= dtype(levels)
        tokens += pixels[:, row::patch, column::patch]
    return tokens.reshape(count, picture.length)


def decode_images(
    tokens: Integer[np.ndarray, "N L"], picture: ImageFormat
) -> UInt8[np.ndarray, "N H W"]:
    """The grey pictures that tokens spell: exact for all that `encode_pictures` can tell apart."""
    count, length = tokens.shape
    if length != picture.length:
        raise MemtrainError(f"a picture has {picture.length} tokens, not {length}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < picture.vocab_size):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are no picture: "
            f"must be 0..{picture.vocab_size - 1}"
        )
    height, width, patch = picture.height, picture.width, picture.patch
    squares = tokens.astype(np.int64).reshape(count, height // patch, width // patch)
    greys = np.rint(np.arange(picture.levels) * (255 / (picture.levels - 1))).astype(np.uint8)
    if picture.levels == 2:
        greys = greys[::-1]  # ink is dark
    gray = np.empty((count, height, width), np.uint8)
    for index, (row, column) in enumerate(_places(patch)):
        digit = squares // picture.levels ** (patch**2 - 1 - index) % picture.levels
        gray[:, row::patch, column::patch] = greys[digit]
    return gray


def _places(patch: int) -> list[tuple[int, int]]:
    """The pixels of a square in raster order."""
    return [(row, column) for row in range(patch) for column in range(patch)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Which copies of a picture are learned beside it."""

    mirror: bool = False
    """Left and right exchanged."""
    shift: int = 0
    """Moved by so many pixels in each of eight directions; the border is repeated where it came
    from."""

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise MemtrainError(f"shift={self.shift}: must be at least 0 pixels; 1 or 2 are usual")

    @property
    def count(self) -> int:
        """Pictures made of one, itself included."""
        return (1 + self.mirror) * (9 if self.shift else 1)

    def of(self, gray: UInt8[np.ndarray, "N H W"]) -> Iterator[UInt8[np.ndarray, "N H W"]]:
        """The pictures as they are, then one copy of all after the other."""
        _, height, width = gray.shape
        if self.shift >= min(height, width):
            raise MemtrainError(
                f"shift={self.shift}: pictures have {height}x{width} pixels (height x width)"
            )
        steps = (0, -self.shift, self.shift) if self.shift else (0,)
        margin = ((0, 0), (self.shift, self.shift), (self.shift, self.shift))
        for side in (gray, gray[:, :, ::-1])[: 1 + self.mirror]:
            wide = np.pad(side, margin, mode="edge")
            for down in steps:
                for right in steps:
                    top, left = self.shift - down, self.shift - right
                    yield wide[:, top : top + height, left : left + width]
