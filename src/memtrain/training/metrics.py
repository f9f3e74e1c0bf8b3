"""metrics.jsonl: what a run writes down while it runs, for programs."""

import json
import os
from pathlib import Path

from memtrain.errors import MemtrainError
from memtrain.files import open_append, open_regular, sync

MAX_METRICS_BYTES = 2**28
MAX_LINE_BYTES = 2**22


def _counted(record: dict) -> bool:
    """Whether it says where it belongs."""
    counters = (record.get("step"), record.get("total_steps"))
    return isinstance(record.get("stage"), str) and all(type(one) is int for one in counters)


class MetricsFile:
    """One JSON object a line, appended; cut back to a checkpoint's length on resume.

    Only a regular file is read or written, and no link is followed to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Bytes of lines that were there and are gone: somebody deleted or cut the file."""
        self._end: int | None = None

    def append(self, record: dict) -> None:
        try:
            with open_append(self.path) as file:
                there = os.fstat(file.fileno()).st_size
                if self._end is not None:
                    self.lost += max(0, self._end - there)
                file.write((json.dumps(record) + "\n").encode())
                file.flush()
                self._end = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror}; fix that, then resume") from None

    def length(self) -> int:
        """The file's length in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Force all lines to disk."""
        if self.path.exists():
            sync(self.path)

    def cut(self, length: int) -> str:
        """Forget what was written after a checkpoint: it will be written again.

        Returns:
            What is wrong with the lines before, in words; nothing if all are there.
        """
        self._end = None
        if not self.path.is_symlink() and not self.path.exists():
            return f"{self.path}: is gone, {length:,} bytes of lines with it" if length else ""
        with open_append(self.path) as file:
            found = os.fstat(file.fileno()).st_size
            whole = self._last_line_end(min(found, length))
            os.ftruncate(file.fileno(), whole)
        if found == 0 and length:
            return f"{self.path}: is gone, {length:,} bytes of lines with it"
        if whole == length:
            return ""
        return f"{self.path}: {length - whole:,} bytes of lines before the checkpoint are lost"

    def _last_line_end(self, end: int) -> int:
        """Where the last line that ends before `end` does, without reading all of the file."""
        with open_regular(self.path) as file:
            while end > 0:
                begin = max(0, end - 2**16)
                file.seek(begin)
                at = file.read(end - begin).rfind(b"\n")
                if at >= 0:
                    return begin + at + 1
                end = begin
        return 0

    def read(self) -> list[dict]:
        """All whole lines; one that is being written, or was torn, is not there yet.

        Raises:
            MemtrainError: a line is not JSON, or not a line of metrics; the file is too large.
        """
        if not self.path.exists():
            return []
        records = []
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_METRICS_BYTES:
                raise MemtrainError(
                    f"{self.path}: has {size:,} bytes; at most {MAX_METRICS_BYTES:,} are read"
                )
            number = 0
            while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
                number += 1
                records.append(self._parsed(line, number))
        if len(line) > MAX_LINE_BYTES:
            raise MemtrainError(f"{self.path}: line {number + 1} is too long for a line of metrics")
        return records

    def _parsed(self, line: bytes, number: int) -> dict:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise MemtrainError(f"{self.path}: line {number} is not JSON") from None
        if not isinstance(record, dict) or not _counted(record):
            raise MemtrainError(f"{self.path}: line {number} has no stage or no step")
        return record
