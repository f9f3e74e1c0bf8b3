"""Bits per byte of the compressor PPMd on the held-out part of prepared data.

    memtrain data enwik8 --data-dir enwik8.gz --out data/enwik8
    memtrain data enwik8 --data-dir enwik8.gz --option held_out test --out data/enwik8-test
    python scripts/ppmd.py data/enwik8 data/enwik8-test --orders 6 8 12 --memory 2047

It reads all of the training part, then each held-out sequence on its own, as a network does from
the empty memory. The order with the fewest bits on the first data is scored on the second.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError
from memtrain.evaluation.ppmd import SYMBOLS, ppmd_losses

MIB = 2**20


def read(store: Store, split: str) -> bytes:
    """A split, one byte per token."""
    if store.meta.vocab_size > SYMBOLS:
        raise MemtrainError(f"{store.folder}: has {store.meta.vocab_size} tokens, PPMd reads bytes")
    return store.tokens(split).tobytes()


def sequences(data: bytes, length: int, most: int) -> Iterator[bytes]:
    """At most `most` stretches of data, evenly spread; each has `length` targets."""
    whole = (len(data) - 1) // length
    count = min(most, whole)
    for number in range(count):
        first = number * whole // count * length
        yield data[first : first + length + 1]


def bits(store: Store, order: int, options: argparse.Namespace) -> float:
    """The mean bits per byte of the held-out sequences."""
    train, held_out = read(store, "train"), read(store, "test")
    chosen = list(sequences(held_out, options.length, options.sequences))
    memory = options.memory * MIB
    losses = ppmd_losses(train, chosen, order, memory=memory, most=len(train))
    return sum(losses) / len(losses) / math.log(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+", help="to choose the order on, and to score")
    parser.add_argument("--orders", type=int, nargs="+", default=[4, 6, 8, 12, 16])
    parser.add_argument("--memory", type=int, default=256, help="MiB for its model, to 4095")
    parser.add_argument("--length", type=int, default=1024, help="targets per held-out sequence")
    parser.add_argument("--sequences", type=int, default=512, help="held-out sequences at most")
    options = parser.parse_args()
    try:
        stores = [open_store(path) for path in options.data]
        found = {order: bits(stores[0], order, options) for order in options.orders}
        for order, one in found.items():
            print(f"{options.data[0]}, order {order}: {one:.4f} bits per byte", file=sys.stderr)
        best = min(found, key=lambda order: found[order])
        scores = {str(options.data[0]): found[best]}
        for path, store in list(zip(options.data, stores, strict=True))[1:]:
            scores[str(path)] = bits(store, best, options)
    except MemtrainError as error:
        print(f"ppmd: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"order": best, "length": options.length, "bits_per_byte": scores}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
