"""What is held out for evaluation: the end of a stream, or pictures by their names."""

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data.store import Split
from memtrain.errors import MemtrainError


def check_share(held_out: float) -> None:
    """Refuse a share that would hold out nothing or everything."""
    if not 0 < held_out < 1:
        raise MemtrainError(f"held_out={held_out}: must be above 0 and below 1; 0.1 is usual")


def split_stream(
    tokens: Integer[np.ndarray, " N"], starts: Int64[np.ndarray, " K"], share: float
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one."""
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        whole = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], whole), "test": Split(tokens[cut:], whole)}
    first = len(starts) - held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


def held_out_count(total: int, share: float, what: str) -> int:
    """How many of `total` are held out: at least one, and never all."""
    if total < 2:
        raise MemtrainError(f"{what}: {total}, at least 2 are needed to hold one out")
    return min(total - 1, max(1, round(share * total)))


def held_out_names(names: Iterable[str], share: float) -> set[str]:
    """Which names are held out: a hash of each decides, so that others may come and go.

    Where that would leave a side empty, the name nearest to it changes sides.
    """
    rank = {name: _rank(name) for name in names}
    held_out_count(len(rank), share, "different images")
    held = {name for name, place in rank.items() if place < share}
    if not held:
        return {min(rank, key=rank.__getitem__)}
    if len(held) == len(rank):
        held.remove(max(rank, key=rank.__getitem__))
    return held


def _rank(name: str) -> float:
    """A number of 0..1 that follows from a name; names of files need not be UTF-8."""
    raw = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8]) / 2**64
