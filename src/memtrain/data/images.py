"""Images as tokens and back, in grey or in the colours of a palette, and data augmentation."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer, UInt8, UInt16

from memtrain.data.palette import Palette, nearest_colours
from memtrain.errors import MemtrainError

Pixels = UInt8[np.ndarray, "N H W *colour"]
"""Grey images (N, H, W), 0 black, or colour images (N, H, W, 3): red, green and blue."""
MAX_TOKENS = 2**16
"""Tokens of 16 bits: 4x4 pixels of 2 levels, or 2x2 pixels of 16."""
MAX_PATCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFormat:
    """How the images of a data set are encoded as tokens.

    With more than two levels a pixel is a grey level, 0 black. With two levels it is ink, 1 dark
    and 0 light. A token is a pixel, or a patch x patch square of pixels: a number in base
    `levels`, whose digits are the pixels in raster order, the top left one first (highest).

    In colour, a token is a pixel: the number of the nearest colour of the palette.
    """

    height: int
    width: int
    levels: int = 256
    patch: int = 1
    palette: Palette = ()
    """The colours of the levels; empty if images are grey."""

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
                f"most {MAX_TOKENS:,} are possible; set levels=2 or a smaller patch"
            )
        if self.height % self.patch or self.width % self.patch:
            raise MemtrainError(
                f"patch={self.patch}: must divide the image, {self.height}x{self.width} "
                "(height x width); choose another size"
            )
        if not self.palette:
            return
        if len(self.palette) != self.levels:
            raise MemtrainError(f"palette: {len(self.palette)} colours for {self.levels} levels")
        if self.patch != 1:
            raise MemtrainError(
                f"patch={self.patch} with colour: a colour token is one pixel; leave patch out"
            )
        if not all(0 <= channel <= 255 for colour in self.palette for channel in colour):
            raise MemtrainError("palette: red, green and blue must be 0..255")

    @property
    def vocab_size(self) -> int:
        return self.levels**self.patch**2

    @property
    def length(self) -> int:
        """Tokens per image."""
        return (self.height // self.patch) * (self.width // self.patch)


def encode_images(
    pixels: Pixels,
    *,
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
    palette: Palette = (),
) -> UInt8[np.ndarray, "N L"] | UInt16[np.ndarray, "N L"]:
    """Encode images as tokens; see `ImageFormat`.

    Args:
        pixels: in colour if there is a palette, else grey.
        levels: 2 binarises, 256 keeps every grey level, others round to the nearest level.
        patch: side of the squares of pixels that make one token.
        threshold: with two grey levels only: darker pixels are ink; 128 by default.
        palette: the colours to choose from, as many as `levels`.
    """
    count, height, width = pixels.shape[:3]
    image = ImageFormat(height=height, width=width, levels=levels, patch=patch, palette=palette)
    if palette:
        return nearest_colours(pixels, palette).reshape(count, image.length)
    if levels > 2:
        if threshold is not None:
            raise MemtrainError(f"threshold={threshold} with levels={levels}: only for levels=2")
        pixels = np.rint(np.arange(256) * ((levels - 1) / 255)).astype(np.uint8)[pixels]
    else:
        threshold = 128 if threshold is None else threshold
        if not 1 <= threshold <= 255:
            raise MemtrainError(f"threshold={threshold}: must be 1..255; darker than it is ink")
        pixels = (pixels < threshold).astype(np.uint8)
    if patch == 1:
        return pixels.reshape(count, image.length)
    dtype = np.uint8 if image.vocab_size <= 256 else np.uint16
    tokens = np.zeros((count, height // patch, width // patch), dtype)
    for row, column in np.ndindex(patch, patch):
        tokens *= dtype(levels)
        tokens += pixels[:, row::patch, column::patch]
    return tokens.reshape(count, image.length)


def decode_images(tokens: Integer[np.ndarray, "N L"], image: ImageFormat) -> Pixels:
    """Decode tokens to images: the inverse of `encode_images` up to its rounding."""
    count, length = tokens.shape
    if length != image.length:
        raise MemtrainError(f"an image has {image.length} tokens, not {length}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < image.vocab_size):
        raise MemtrainError(
            f"tokens {tokens.min()}..{tokens.max()} are not an image: "
            f"must be 0..{image.vocab_size - 1}"
        )
    height, width, patch = image.height, image.width, image.patch
    if image.palette:
        return np.array(image.palette, np.uint8)[tokens.astype(np.int64)].reshape(
            count, height, width, 3
        )
    squares = tokens.astype(np.int64).reshape(count, height // patch, width // patch)
    greys = np.rint(np.arange(image.levels) * (255 / (image.levels - 1))).astype(np.uint8)
    if image.levels == 2:
        greys = greys[::-1]  # ink is dark
    gray = np.empty((count, height, width), np.uint8)
    for index, (row, column) in enumerate(np.ndindex(patch, patch)):
        digit = squares // image.levels ** (patch**2 - 1 - index) % image.levels
        gray[:, row::patch, column::patch] = greys[digit]
    return gray


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Data augmentation: horizontal flips and shifts."""

    mirror: bool = False
    """Add mirrored images."""
    shift: int = 0
    """Add images shifted by this many pixels in eight directions; the border is repeated."""

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise MemtrainError(f"shift={self.shift}: must be at least 0 pixels; 1 or 2 are usual")

    @property
    def count(self) -> int:
        """Images made from one, itself included."""
        return (1 + self.mirror) * (9 if self.shift else 1)

    def apply(self, pixels: Pixels) -> Iterator[Pixels]:
        """Yield the images unchanged, then each variant of all of them."""
        _, height, width = pixels.shape[:3]
        if self.shift >= min(height, width):
            raise MemtrainError(
                f"shift={self.shift}: images have {height}x{width} pixels (height x width)"
            )
        steps = (0, -self.shift, self.shift) if self.shift else (0,)
        margin = [(0, 0), (self.shift, self.shift), (self.shift, self.shift), (0, 0)][: pixels.ndim]
        for side in (pixels, pixels[:, :, ::-1])[: 1 + self.mirror]:
            wide = np.pad(side, margin, mode="edge")
            for down in steps:
                for right in steps:
                    top, left = self.shift - down, self.shift - right
                    yield wide[:, top : top + height, left : left + width]
