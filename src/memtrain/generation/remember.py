"""`remember`: read any amount of text, an image or tokens, and keep the memory."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError
from memtrain.generation.generate import rnn_and_codec, sampling_mode
from memtrain.generation.memory import Memory, MemoryCard, shortened
from memtrain.generation.sampling import READ_STEPS
from memtrain.generation.sources import Source, SourceReader
from memtrain.runs.fingerprint import tensors_checksum


def remember(
    model: Any,
    given: Source | Iterable[Source],
    *,
    memory: Memory | None = None,
    label: str | int | None = None,
    skip_unknown: bool = False,
    report: Callable[[int, int], None] = lambda read, total: None,
) -> Memory:
    """Read texts, an image or tokens with a model; returns its memory after the last token.

    Time grows with their length, memory use does not.

    Args:
        model: a `Run`, or the result of `load_pretrained` or `load_rnn`.
        given: a string is a text; a `Path` a file with what the model takes: a text, an image,
            token numbers, or a .npy of tokens; an array (P,) is tokens. Several are read one after
            another, with nothing between them.
        memory: continue from this one instead of the empty memory.
        label: the class of an image, if the model's images have classes.
        skip_unknown: leave out characters that do not occur in the training text, which are
            refused otherwise.
        report: called with the number of tokens read, and of all, every now and then.

    Raises:
        MemtrainError: the model cannot read it, or the memory is not finite.

    Example: `remember(load_rnn("runs/text"), Path("book.txt")).save("book.mem")`
    """
    rnn, codec = rnn_and_codec(model)
    sources: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str | Path | np.ndarray):
        sources = list(given)
    if not sources:
        raise MemtrainError("given=[]: must hold at least one text, file or array")
    for one in sources:
        if not isinstance(one, Source):
            raise MemtrainError(
                f"given={type(one).__name__}: must be a text (str), a file (pathlib.Path) or "
                "tokens (numpy.array), or several of these"
            )
    if codec.picture is not None and (len(sources) > 1 or memory is not None):
        raise MemtrainError("given: this model reads one image, from the empty memory")
    device, source = rnn.readout.head.weight.device, _name(sources)
    start = _start(codec, label)

    # Encoding takes little time, and what cannot be encoded is refused before an hour of reading.
    check = SourceReader(codec, skip_unknown=skip_unknown)
    total = sum(len(piece) for one in sources for piece in check.tokens(one))
    reader = SourceReader(codec, skip_unknown=skip_unknown)
    pieces = chain.from_iterable(map(reader.tokens, sources))
    if not total:
        raise MemtrainError(f"{source}: holds nothing to read")
    if memory is None:
        state, before, left_out = rnn.empty_memory(1), 0, check.left_out
        pieces = chain([start], pieces)
    else:
        memory.check_model(rnn)
        state, before = memory.values[None].to(device), memory.card.tokens
        left_out = memory.card.left_out + check.left_out
        source = f"{memory.card.source}, {source}"
    read = 0
    with sampling_mode(rnn), torch.no_grad():
        for block in _blocks(pieces, READ_STEPS):
            state = rnn.unroll(torch.from_numpy(block)[None].to(device), state)[:, -1]
            read += len(block)
            report(read, total)
    if not bool(state.isfinite().all()):
        raise MemtrainError(
            f"{source}: the memory is not finite after {read:,} tokens; the model's weights are "
            "damaged or its training diverged: take an earlier checkpoint"
        )
    card = MemoryCard(
        model=tensors_checksum(rnn.state_dict()),
        name=model.config.name,
        tokens=before + read,
        kind="text" if codec.text else "image" if codec.picture else "tokens",
        source=shortened(source),
        left_out=left_out,
    )
    return Memory(state[0].float().cpu(), card)


def _start(codec: TokenCodec, label: str | int | None) -> Int64[np.ndarray, " K"]:
    """What is read before everything else: the token of a class, or a start token, if any."""
    if label is not None:
        return np.array([codec.writable + codec.class_number(label)])
    if codec.classes:
        raise MemtrainError(
            f"label: this model's images have classes; name that of the image, one of "
            f"{', '.join(codec.classes)}"
        )
    return np.array([] if codec.start_written else [codec.start_token], np.int64)


def _name(sources: list[Source]) -> str:
    return ", ".join(
        one.name if isinstance(one, Path) else "a text" if isinstance(one, str) else "tokens"
        for one in sources
    )


def _blocks(
    pieces: Iterable[Int64[np.ndarray, " K"]], size: int
) -> Iterator[Int64[np.ndarray, " N"]]:
    """The tokens of all pieces in blocks of one size, but for the last: how a text is cut in
    pieces then changes no rounding."""
    held: list[np.ndarray] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += len(piece)
        if count >= size:
            joined = np.concatenate(held)
            whole = count - count % size
            yield from np.split(joined[:whole], whole // size)
            held, count = [joined[whole:]], count % size
    if count:
        yield np.concatenate(held)
