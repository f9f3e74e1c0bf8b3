"""PPMd, a compressor that predicts each byte from the longest context it has seen, as a baseline.

It reads the training data first, so that its model knows it, then each held-out sequence on its
own: the length in bits of what it writes is its loss. The sequence's first token is context, as it
is for a network; the others are the targets. So for every sequence s

    bits(s) = 8 (bytes(train + s) - bytes(train + s[0]))

which is exact to a byte per sequence, upwards or downwards, and has no bias on average. The state
after the training data is needed many times. A process of its own, which imports no torch, reads
the training data once and forks for each sequence, so that no sequence is seen by another.

Variant H (PPMd7, as in 7-Zip), with limited memory for its model; when that is full it starts
afresh. Its order, the longest context in bytes, is the caller's choice. (pip install pyppmd)
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from memtrain.errors import MemtrainError

ORDERS = (4, 6, 8, 12, 16)
"""Orders to choose from on other held-out data; larger ones gain nothing on a few megabytes."""
MEMORY = 2**28
"""Bytes for its model, unless a caller gives more."""
MOST_BYTES = 2**26
"""Of longer training data the end is read, unless a caller takes more."""
SYMBOLS = 256


def ppmd_missing() -> str:
    """Why PPMd cannot be scored here, in words; "" if it can."""
    if find_spec("pyppmd") is None:
        return 'pyppmd is not installed: pip install "memtrain[race]"'
    return "" if hasattr(os, "fork") else "this system cannot fork processes"


def ppmd_losses(
    train: bytes,
    sequences: Sequence[bytes],
    order: int,
    *,
    memory: int = MEMORY,
    most: int = MOST_BYTES,
) -> list[float]:
    """Nats per target of each held-out sequence, whose first byte is context.

    Args:
        train: the training data, one byte per token.
        sequences: held-out data, at least two bytes each.
        order: the longest context, 2 to 64.
        memory: bytes for its model, below 2**32.
        most: of longer training data its last bytes are read.

    Raises:
        MemtrainError: pyppmd is missing, or it failed.
    """
    if reason := ppmd_missing():
        raise MemtrainError(f"PPMd: {reason}")
    train = train[-most:]
    head = json.dumps([order, memory, len(train), *map(len, sequences)]).encode() + b"\n"
    done = subprocess.run(
        [sys.executable, "-m", "memtrain.evaluation.ppmd"],
        input=b"".join([head, train, *sequences]),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C ends it through this process
    )
    if done.returncode:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["it was ended"])[-1]
        raise MemtrainError(f"PPMd: failed ({reason}); update pyppmd, or uninstall it")
    bits = json.loads(done.stdout)
    lengths = [len(sequence) - 1 for sequence in sequences]
    return [math.log(2) * one / length for one, length in zip(bits, lengths, strict=True)]


def _serve() -> None:
    """Entry point of the process: sizes and bytes on stdin, bits of each sequence on stdout."""
    import pyppmd

    order, memory, *sizes = json.loads(sys.stdin.buffer.readline())
    train, *sequences = (sys.stdin.buffer.read(size) for size in sizes)
    encoder = pyppmd.Ppmd7Encoder(order, memory)
    encoder.encode(train)
    bits = [8 * (_size(encoder, sequence) - _size(encoder, sequence[:1])) for sequence in sequences]
    print(json.dumps(bits))


def _size(encoder: "object", data: bytes) -> int:
    """Bytes that an encoder writes for some data, computed in a copy of this process."""
    reader, writer = os.pipe()
    if not os.fork():
        size = len(encoder.encode(data)) + len(encoder.flush())  # type: ignore[attr-defined]
        os.write(writer, str(size).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        size = int(pipe.read())
    os.wait()
    return size


if __name__ == "__main__":
    _serve()
