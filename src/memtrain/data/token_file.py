"""Tokens that stay on disk: a store larger than memory is trained from its files.

Windows and blocks are read with `pread` where they are needed. Only the pages that are touched are
read; they go to the system's page cache, which is freed under memory pressure, and not to the
process. This is safer than a memory map: when a mapped file is cut short, or its disk fails, the
process dies (SIGBUS); here a read fails, and the error has words.
"""

import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.errors import MemtrainError
from memtrain.files import open_regular

READ = 2**26
"""Bytes of one read: the system reads at most 2 GiB at once."""


class TokenFile:
    """The tokens of one split, on disk. The file stays open, so it may be renamed or removed.

    Args:
        path: the file, which holds tokens and nothing else.
        dtype: of the tokens.
        tokens: how many there are.
        vocab_size: every token that is read must be below.

    Raises:
        MemtrainError: the file has another size, or is not a regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokens: int, vocab_size: int) -> None:
        self.path, self.dtype, self.vocab_size = path, dtype, vocab_size
        self._length = tokens
        with open_regular(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        if sys.platform == "linux":  # windows lie anywhere: to read ahead would waste reads
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._stamp = self._current_stamp()
        if self._stamp[0] != self.nbytes:
            raise MemtrainError(
                f"{path.name} has {self._stamp[0]:,} bytes, {self.nbytes:,} were written"
            )

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return self._length * self.dtype.itemsize

    def windows(self, offsets: Int64[np.ndarray, " B"], size: int) -> Int64[np.ndarray, "B size"]:
        """The windows of `size` tokens that start at these offsets.

        Raises:
            MemtrainError: the file changed since it was opened, cannot be read, or one of these
                tokens is outside the vocabulary.
        """
        width = self.dtype.itemsize
        raw = b"".join(self._read(offset * width, size * width) for offset in offsets.tolist())
        tokens = np.frombuffer(raw, self.dtype).reshape(len(offsets), size)
        self._check(tokens, lambda at: int(offsets[at // size]) + at % size)
        return tokens.astype(np.int64)

    def __getitem__(self, part: slice) -> Integer[np.ndarray, " N"]:
        """A stretch of tokens, read into memory."""
        first, last, step = part.indices(self._length)
        assert step == 1
        width, raw = self.dtype.itemsize, bytearray()
        while len(raw) < (last - first) * width:
            left = (last - first) * width - len(raw)
            raw += self._read(first * width + len(raw), min(READ, left))
        tokens = np.frombuffer(raw, self.dtype)
        self._check(tokens, lambda at: first + at)
        return tokens

    def checked_blocks(self, sha256: str) -> Iterator[Integer[np.ndarray, " block"]]:
        """All tokens in order; a MemtrainError after the last block if their checksum differs."""
        digest, step = hashlib.sha256(), READ // self.dtype.itemsize
        for first in range(0, self._length, step):
            block = self[first : first + step]
            digest.update(block.data)
            yield block
        if digest.hexdigest() != sha256:
            raise MemtrainError(
                f"{self.path}: is not what was written (checksum); remove the store and prepare "
                "it again"
            )

    def _read(self, first: int, count: int) -> bytes:
        try:
            raw = os.pread(self._descriptor, count, first)
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror or error}") from None
        if len(raw) != count:
            raise self._changed()
        return raw

    def _check(self, tokens: Integer[np.ndarray, "*shape"], place: Callable[[int], int]) -> None:
        """Refuse tokens outside the vocabulary, and a file that changed."""
        if self._current_stamp() != self._stamp:
            raise self._changed()
        if self.vocab_size <= np.iinfo(self.dtype).max and tokens.size:
            at = int(tokens.argmax())
            if (found := int(tokens.reshape(-1)[at])) >= self.vocab_size:
                raise MemtrainError(
                    f"{self.path}: token {place(at):,} is {found:,}, outside the vocabulary "
                    f"0..{self.vocab_size - 1:,}: damaged; remove the store and prepare it again"
                )

    def _changed(self) -> MemtrainError:
        return MemtrainError(
            f"{self.path}: changed while it was in use; prepare the data again, and resume from "
            "the last checkpoint if it is the same"
        )

    def _current_stamp(self) -> tuple[int, int]:
        """Size and time of the last write; a file that is renamed or removed keeps them."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns
