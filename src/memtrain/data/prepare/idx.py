"""IDX files, the format of MNIST."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from memtrain.data.prepare.limits import FREE, GROWTH
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

MAX_IDX_BYTES = 4 * 2**30
"""An IDX file that claims to hold more than this is refused before it is read."""


def read_idx(path: Path) -> UInt8[np.ndarray, "N H W"] | UInt8[np.ndarray, " N"]:
    """Read an IDX file of bytes, images or labels, plain or gzipped.

    Raises:
        MemtrainError: it is no such file, cut short, or longer than its header says.
    """
    try:
        with (
            open_regular(path) as stored,
            gzip.open(stored) if path.suffix == ".gz" else stored as file,
        ):
            magic = file.read(4)
            if magic not in (b"\0\0\x08\x03", b"\0\0\x08\x01"):
                raise MemtrainError(
                    f"{path}: starts with {magic.hex() or 'nothing'}, not with the mark of an IDX "
                    "file of byte images (00000803) or labels (00000801)"
                )
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise MemtrainError(f"{path}: cut short in its header; get it again")
            shape = struct.unpack(f">{magic[3]}I", header)
            size = math.prod(shape)
            limit = min(MAX_IDX_BYTES, max(FREE, GROWTH * path.stat().st_size))
            if not 0 < size <= limit:
                raise MemtrainError(f"{path}: its header claims {shape}: {size:,} bytes")
            data = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MemtrainError(f"{path}: damaged or cut short ({error}); get it again") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    if len(data) != size:
        held = "more" if len(data) > size else f"{len(data):,}"
        raise MemtrainError(f"{path}: its header claims {size:,} bytes, it holds {held}")
    return np.frombuffer(data, np.uint8).reshape(shape)
