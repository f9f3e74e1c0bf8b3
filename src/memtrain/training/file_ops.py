"""The few file operations that a checkpoint is made of, so that a test can fail any of them."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from memtrain.files import open_new, sync

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that safetensors has for what we save."""


class Files:
    """The disk. Each method is one operation: a crash comes before or after it, or inside."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)  # a run folder that is gone stays gone

    def write(self, path: Path, content: bytes) -> None:
        with open_new(path) as file:
            file.write(content)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        """Write safetensors and return the sha256 of what was meant to be written.

        The library's own writer holds Python's lock all the while, which would stall a step.
        """
        digest = hashlib.sha256()
        with open_new(path) as file:
            for piece in safetensors_pieces(tensors):
                digest.update(piece)
                file.write(piece)
        return digest.hexdigest()

    def sync(self, path: Path) -> None:
        """Force a file or a folder's entries to disk."""
        sync(path)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link or a folder with all that is in it; it need not be there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Files()


def safetensors_pieces(tensors: Mapping[str, Tensor]):
    """The bytes of a safetensors file: length of the header, header, one tensor after another."""
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
