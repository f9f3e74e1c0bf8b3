"""Let a recurrent network write: from nothing, after a prompt, or the rest of a picture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Integer, UInt8

from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError
from memtrain.files import write_named
from memtrain.generation.sampling import write_chunks
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler
from memtrain.plotting.image_grid import save_grid

PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".svg"}
TEXT_LENGTH = 512
"""Characters that are written unless asked otherwise."""


@runtime_checkable
class Writer(Protocol):
    """What can write: a run, or a pretrained model."""

    @property
    def rnn(self) -> RNN: ...

    @property
    def spelling(self) -> TokenCodec | None:
        """None for a task that asks for answers."""
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences that a model wrote, what it was given included."""

    tokens: Int64[np.ndarray, "B T"]
    given: int
    """How many tokens at the beginning of each were given."""
    spelling: TokenCodec

    def __repr__(self) -> str:
        count, length = self.tokens.shape
        kind = "picture" if self.spelling.picture else "text" if self.spelling.text else "sequence"
        several = "" if count == 1 else "s"
        return f"<Written: {count} {kind}{several} of {length} tokens, {self.given} of them given>"

    def _repr_png_(self) -> bytes | None:
        """The pictures as a grid, for notebooks."""
        if self.spelling.picture is None:
            return None
        with TemporaryDirectory() as folder:
            self.save(path := Path(folder) / "grid.png")
            return path.read_bytes()

    def texts(self) -> list[str]:
        return [self.spelling.decode_text(row) for row in self.tokens]

    def pictures(self) -> UInt8[np.ndarray, "B H W"]:
        return self.spelling.decode_images(self.tokens)

    def save(self, path: Path | str, originals: Integer[np.ndarray, "B T"] | None = None) -> None:
        """Write pictures as a PNG grid, anything else as text.

        Args:
            path: the file.
            originals: whole sequences of which the beginnings were given: shown above the
                completions, in which the model's part is tinted.
        """
        path, picture = Path(path), self.spelling.picture
        if picture is not None and path.suffix.lower() != ".png":
            raise MemtrainError(f"{path}: pictures are written as a PNG; end it in .png")
        if picture is None:
            check_text_file(path)
            write_named(path, "\n\n----\n\n".join(self.texts()).encode())
        elif originals is None:
            save_grid(path, self.pictures())
        else:
            made = np.arange(picture.length) >= self.given
            made = made.reshape(picture.height // picture.patch, -1).astype(np.uint8)
            made = made.repeat(picture.patch, axis=0).repeat(picture.patch, axis=1)
            shown = self.spelling.decode_images(originals)
            save_grid(path, self.pictures(), originals=shown, made=made)


def check_text_file(path: Path) -> None:
    """Refuse a picture's file name for text."""
    if path.suffix.lower() in PICTURE_SUFFIXES:
        raise MemtrainError(f"{path}: this model writes text; end it in .txt")


def generate(
    model: Writer,
    *,
    prompt: str | Integer[np.ndarray, " P"] | Integer[np.ndarray, "B P"] | None = None,
    count: int = 1,
    length: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    listen: Callable[[Int64[np.ndarray, "B K"]], None] | None = None,
) -> Samples:
    """Let a model write from the empty memory. Its teacher is not used.

    Args:
        model: a `Run`, or what `load_pretrained` returns.
        prompt: read first and kept: a text, or tokens, the same for all sequences or each its
            own. Nothing: the model begins as its data most often does.
        count: how many sequences; of a prompt (B, P), B.
        length: how many tokens to write; a picture is always finished.
        temperature: below 1 is safer, above 1 is wilder, 0 takes the likeliest token.
        top_k: choose among the k likeliest tokens only (0: all).
        top_p: choose among the likeliest tokens that together have this probability.
        seed: the same seed writes the same, on the same kind of device.
        listen: hears the tokens as they are written, a few at a time.

    Raises:
        MemtrainError: an argument is not what it must be, or the model's logits are NaN.

    Example: `generate(load_pretrained("mnist-small"), count=64).save("digits.png")`
    """
    _check_model(model)
    spelling = model.spelling
    if spelling is None:
        raise MemtrainError("this model answers questions and has no sequences to write")
    if count < 1:
        raise MemtrainError(f"count={count}: must be at least 1")
    if not 0 <= seed < 2**63:
        raise MemtrainError(f"seed={seed}: must be at least 0 and below 2**63")
    given = _given(spelling, prompt, count)
    length = _length(spelling, given.shape[1], length)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, allowed=spelling.writable)
    device = model.rnn.readout.head.weight.device
    read = torch.from_numpy(given).to(device)
    if not spelling.start_written or not given.shape[1]:
        start = torch.full((len(given), 1), spelling.start_token, device=device)
        read = torch.cat([start, read], dim=1)
        if spelling.start_written:  # then it is the first token of what is written
            given, length = read.cpu().numpy(), length - 1
    training = model.rnn.training
    model.rnn.eval()
    try:
        generator = torch.Generator(device).manual_seed(seed)
        parts = [given]
        with _any_kernel():
            for chunk in write_chunks(model.rnn, read, length, generator, sampler):
                parts.append(chunk.cpu().numpy())
                if listen is not None:
                    listen(parts[-1])
    finally:
        model.rnn.train(training)
    return Samples(np.concatenate(parts, axis=1), given.shape[1], spelling)


def _check_model(model: Any) -> None:
    """Refuse what is not a model, above all the name of one."""
    if isinstance(model, str | Path):
        raise MemtrainError(
            f"model={str(model)!r}: is a name, not a model; load it: "
            f"load_pretrained({str(model)!r}), or load_rnn({str(model)!r}) of a run's folder"
        )
    if not isinstance(model, Writer):
        raise MemtrainError(
            f"model={type(model).__name__}: must be a Run, or what load_pretrained or load_rnn "
            "returns"
        )


@contextmanager
def _any_kernel() -> Iterator[None]:
    """torch has no sum along a row of a GPU that it calls deterministic, and a run that asks for
    such kernels would be refused. Rows are short, and added up in one piece."""
    if not torch.are_deterministic_algorithms_enabled():
        yield  # to say so again would import torch's compiler, which takes a second
        return
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warned)


def _given(
    spelling: TokenCodec, prompt: str | np.ndarray | None, count: int
) -> Int64[np.ndarray, "B P"]:
    if prompt is None:
        return np.zeros((count, 0), np.int64)
    if isinstance(prompt, str) and spelling.picture is not None:
        raise MemtrainError(
            f"prompt={prompt[:20]!r}: this model writes pictures; give the tokens of a picture's "
            "beginning (on the command line: --image FILE)"
        )
    tokens = spelling.encode_text(prompt) if isinstance(prompt, str) else np.asarray(prompt)
    if not tokens.size:
        raise MemtrainError("prompt: must hold at least one token")
    if tokens.ndim > 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise MemtrainError(
            f"prompt: {tokens.dtype} of shape {tokens.shape}: must be a text, or whole numbers, "
            "1-D (the same for all) or 2-D (each its own)"
        )
    if tokens.min() < 0 or tokens.max() >= spelling.writable:
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise MemtrainError(f"prompt: {bad} is no token, must be 0..{spelling.writable - 1}")
    tokens = tokens.astype(np.int64)
    return np.tile(tokens, (count, 1)) if tokens.ndim == 1 else tokens


def _length(spelling: TokenCodec, given: int, length: int | None) -> int:
    """How many tokens follow what is given, a start token that is written among them."""
    picture = spelling.picture
    if picture is None:
        length = TEXT_LENGTH if length is None else length
        if length < 1:
            raise MemtrainError(f"length={length}: must be at least 1")
        return length + (not given)  # the start token is not counted
    if length is not None and length != picture.length:
        raise MemtrainError(
            f"length={length}: this model's pictures have {picture.length} tokens; leave it off"
        )
    if given >= picture.length:
        raise MemtrainError(
            f"prompt: {given} tokens leave nothing to complete, a picture has {picture.length}"
        )
    return picture.length - given
