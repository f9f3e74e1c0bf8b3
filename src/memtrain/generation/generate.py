"""`generate`: sample from a model freely, after a prompt, or complete images."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Integer

from memtrain.data.codec import TokenCodec
from memtrain.data.images import Pixels
from memtrain.errors import MemtrainError
from memtrain.files import write_output
from memtrain.generation import GenerateOptions
from memtrain.generation.memory import Memory
from memtrain.generation.sampling import sample_chunks
from memtrain.models.layers import evaluation_mode
from memtrain.models.rnn import RNN
from memtrain.plotting.figures import save_grid
from memtrain.shapes import Values

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".svg"}
TEXT_LENGTH = 512
"""Tokens of a text unless `length` is given."""

Prompt = str | Integer[np.ndarray, " P"] | Integer[np.ndarray, "B P"] | None
Label = str | int | np.integer | np.ndarray | Sequence[str | int]
Listener = Callable[[Int64[np.ndarray, "B K"]], None]


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences from a model, their prompts included."""

    tokens: Int64[np.ndarray, "B T"]
    given: int
    """Length of the prompt in tokens."""
    spelling: TokenCodec
    classes: tuple[str, ...] = ()
    """The class of each image, if the model has classes; no token of `tokens`."""

    def __repr__(self) -> str:
        count, length = self.tokens.shape
        kind = "image" if self.spelling.picture else "text" if self.spelling.text else "sequence"
        several = "" if count == 1 else "s"
        return f"<Samples: {count} {kind}{several} of {length} tokens, {self.given} of them given>"

    def _repr_png_(self) -> bytes | None:
        """Show images as a grid in notebooks."""
        if self.spelling.picture is None:
            return None
        with TemporaryDirectory() as folder:
            self.save(path := Path(folder) / "grid.png")
            return path.read_bytes()

    def texts(self) -> list[str]:
        return [self.spelling.decode_text(row) for row in self.tokens]

    def pictures(self) -> Pixels:
        """Grey images (B, H, W), 0 black, or colour images (B, H, W, 3)."""
        return self.spelling.decode_images(self.tokens)

    def save(self, path: Path | str, originals: Integer[np.ndarray, "B T"] | None = None) -> None:
        """Save images as a PNG grid, anything else as text.

        Args:
            path: the file.
            originals: the complete sequences whose beginnings were the prompts: shown above the
                completions, in which the generated part is tinted.
        """
        path, picture = Path(path), self.spelling.picture
        if picture is not None and path.suffix.lower() != ".png":
            raise MemtrainError(f"{path}: images are saved as PNG; end the name in .png")
        if picture is None:
            check_text_file(path)
            write_output(path, "\n\n----\n\n".join(self.texts()).encode())
        elif originals is None:
            save_grid(path, self.pictures(), columns=self._columns())
        else:
            made = np.arange(picture.length) >= self.given
            made = made.reshape(picture.height // picture.patch, -1).astype(np.uint8)
            made = made.repeat(picture.patch, axis=0).repeat(picture.patch, axis=1)
            shown = self.spelling.decode_images(originals)
            save_grid(path, self.pictures(), originals=shown, made=made)

    def _columns(self) -> int:
        """A row of the grid per class, if each class has equally many images in a row."""
        sizes = {len(list(same)) for _, same in groupby(self.classes)}
        several = len(set(self.classes)) > 1 and len(sizes) == 1
        return sizes.pop() if several and max(sizes) > 1 else 0


def check_text_file(path: Path) -> None:
    """Refuse to save text under the name of an image."""
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise MemtrainError(f"{path}: this model generates text; end the name in .txt")


def generate(
    model: Any,
    *,
    prompt: Prompt = None,
    count: int = 1,
    length: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    label: Label | None = None,
    memory: Memory | None = None,
    listen: Listener | None = None,
) -> Samples:
    """Sample from a model, starting from the empty memory. The teacher is not used.

    Args:
        model: a `Run`, or the result of `load_pretrained` or `load_rnn`.
        prompt: a text, or tokens, shared (P,) or one row per sequence (B, P). It is read first
            and kept. None: the most common beginning of the data.
        count: number of sequences, of each label if there are several; ignored with a prompt
            (B, P).
        label: the class of the images to draw, by name or number, or several: of a model that was
            trained with `labels`. None: classes at random, with their training frequencies. With a
            prompt (B, P), one, or one per row.
        length, temperature, top_k, top_p, seed: see `memtrain.generation.GenerateOptions`.
        memory: start from this memory, which `memtrain.remember` made with the same model, as if
            all that it has read stood before the prompt.
        listen: called with each chunk of tokens as it is sampled.

    Raises:
        MemtrainError: an argument is invalid, or the model's logits are NaN.

    Example: `generate(load_pretrained("mnist-small"), count=64).save("digits.png")`
    """
    labels = () if label is None else map(str, np.atleast_1d(np.asarray(label)))
    options = GenerateOptions(
        count=count,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        label=tuple(labels),
    )
    return generate_with(model, options, prompt, listen, memory)


def generate_with(
    model: Any,
    options: GenerateOptions,
    prompt: Prompt = None,
    listen: Listener | None = None,
    memory: Memory | None = None,
) -> Samples:
    """`generate` with its options as one object."""
    rnn, codec = rnn_and_codec(model)
    _check_memory(memory, rnn, codec)
    given = _given(codec, prompt, (options.count or 1) * max(1, len(options.label)))
    shared = prompt is None or np.ndim(prompt) < 2
    classes, given = _classes(codec, given, options, shared=shared)
    length = _length(codec, given.shape[1], options.length, begun=memory is not None)
    sampler, device = options.sampler(codec.writable), rnn.readout.head.weight.device
    read = torch.from_numpy(given).to(device)
    if memory is None and (not codec.start_written or not given.shape[1]):
        start = torch.full((len(given), 1), codec.start_token, device=device)
        if classes is not None:
            start = torch.from_numpy(codec.writable + classes[:, None]).to(device)
        read = torch.cat([start, read], dim=1)
        if codec.start_written:  # then it is the first token of the sample
            given, length = read.cpu().numpy(), length - 1
    generator = torch.Generator(device).manual_seed(options.seed)
    parts = [given]
    before = None if memory is None else memory.values.to(device).repeat(len(given), 1, 1)
    with sampling_mode(rnn):
        for chunk in sample_chunks(rnn, read, length, generator, sampler, memory=before):
            parts.append(chunk.cpu().numpy())
            if listen is not None:
                listen(parts[-1])
    names = () if classes is None else tuple(codec.classes[number] for number in classes)
    return Samples(np.concatenate(parts, axis=1), given.shape[1], codec, names)


def _check_memory(memory: Memory | None, rnn: RNN, codec: TokenCodec) -> None:
    """Refuse anything but a memory from which this model can continue."""
    if memory is None:
        return
    if not isinstance(memory, Memory):
        raise MemtrainError(
            f"memory={type(memory).__name__}: must be a memtrain.Memory; "
            "memtrain.Memory.load(path) reads a file"
        )
    if codec.picture is not None:
        problem = "memory: this model generates images, and a memory holds no pixels of the part "
        problem += "that was read; complete an image with its first tokens as the prompt"
        raise MemtrainError(problem, f"{problem} (--image FILE)")
    memory.check_model(rnn)


def _classes(
    codec: TokenCodec, given: Int64[np.ndarray, "B P"], options: GenerateOptions, *, shared: bool
) -> tuple[Int64[np.ndarray, " B"] | None, Int64[np.ndarray, "B Q"]]:
    """The class of each row, if the model has classes, and the prompts without their tokens.

    Args:
        codec: of the model.
        given: the prompts.
        options: with the labels.
        shared: whether all rows have the same prompt, so that there are `count` of each label.
    """
    labels = np.array([codec.class_number(label) for label in options.label], np.int64)
    if not codec.classes:
        return None, given
    own, given = codec.split_class(given)
    if own is not None and len(labels):
        raise MemtrainError("label: the prompts begin with their classes; leave label out")
    if own is not None:
        return own, given
    if not len(labels):
        return codec.sample_classes(len(given), options.seed), given
    if not shared and len(labels) not in (1, len(given)):
        raise MemtrainError(
            f"label: {len(labels)} classes for {len(given)} prompts; give one, or one for each"
        )
    return labels.repeat(len(given) // len(labels)), given


def rnn_and_codec(model: Any) -> tuple[RNN, TokenCodec]:
    """The RNN and codec of a model; refuse anything else, above all its name."""
    if isinstance(model, str | Path):
        raise MemtrainError(
            f"model={str(model)!r}: is a name, not a model; load it: "
            f"load_pretrained({str(model)!r}), or load_rnn({str(model)!r}) of a run's folder"
        )
    rnn, codec = getattr(model, "rnn", None), getattr(model, "spelling", None)
    if not isinstance(rnn, RNN):
        raise MemtrainError(
            f"model={type(model).__name__}: must be a Run, or the result of load_pretrained or "
            "load_rnn"
        )
    if isinstance(rnn.space, Values):
        problem = f"model={type(model).__name__}: reads numbers and has no tokens to sample; "
        raise MemtrainError(
            f"{problem}memtrain.forecast(model, inputs, steps) forecasts them",
            f"{problem}memtrain generate forecasts them",
        )
    if codec is None:
        problem = f"model={type(model).__name__}: its task asks for answers and has no sequences "
        problem += "to sample; "
        raise MemtrainError(
            f"{problem}model.rnn(tokens) gives the logits of its answers",
            f"{problem}memtrain eval scores its answers",
        )
    return rnn, codec


@contextmanager
def sampling_mode(rnn: RNN) -> Iterator[None]:
    """Put the RNN in evaluation mode, and allow kernels that torch calls nondeterministic.

    On a GPU torch has no deterministic sum along a row and would refuse. These rows are short and
    summed in one piece, so the result is deterministic.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:  # setting it needlessly would import torch's compiler, which takes a second
        torch.use_deterministic_algorithms(False)
    try:
        with evaluation_mode(rnn):
            yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warned)


def _given(
    codec: TokenCodec, prompt: str | np.ndarray | None, count: int
) -> Int64[np.ndarray, "B P"]:
    """The prompt as tokens, one row per sequence."""
    if prompt is None:
        return np.zeros((count, 0), np.int64)
    tokens = codec.encode_text(prompt) if isinstance(prompt, str) else np.asarray(prompt)
    if not tokens.size:
        raise MemtrainError("prompt: must hold at least one token")
    if tokens.ndim > 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise MemtrainError(
            f"prompt: {tokens.dtype} of shape {tokens.shape}: must be a text, or whole numbers, "
            "1-D (the same for all) or 2-D (each its own)"
        )
    _, plain = codec.split_class(tokens)
    if plain.size and (plain.min() < 0 or plain.max() >= codec.writable):
        bad = plain.min() if plain.min() < 0 else plain.max()
        raise MemtrainError(f"prompt: {bad} is not a token, must be 0..{codec.writable - 1}")
    tokens = tokens.astype(np.int64)
    return np.tile(tokens, (count, 1)) if tokens.ndim == 1 else tokens


def _length(codec: TokenCodec, given: int, length: int | None, *, begun: bool) -> int:
    """Tokens to sample after the prompt, a start token that is part of the sample included; if a
    memory has `begun`, there is none."""
    picture = codec.picture
    if picture is None:
        return (TEXT_LENGTH if length is None else length) + (not given and not begun)
    if length is not None and length != picture.length:
        raise MemtrainError(
            f"length={length}: this model's images have {picture.length} tokens; leave it out"
        )
    if given >= picture.length:
        raise MemtrainError(
            f"prompt: {given} tokens leave nothing to complete, an image has {picture.length}"
        )
    return picture.length - given
