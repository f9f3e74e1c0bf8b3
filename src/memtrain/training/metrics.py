"""metrics.jsonl: one line per evaluation or log interval of a run, for programs."""

import os
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError
from memtrain.files import JsonLines, sync

MAX_METRICS_BYTES = 2**28
MAX_LINE_BYTES = 2**22


class MetricsFile(JsonLines):
    """A run's metrics.jsonl: appended to, and cut back to a checkpoint's length on resume."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_METRICS_BYTES, MAX_LINE_BYTES)

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        try:
            super().append(record, durable=durable)
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror}; fix that, then resume") from None

    def sync(self) -> None:
        """Force all lines to disk."""
        if self.path.exists():
            sync(self.path)

    def cut(self, length: int) -> str:
        """Remove the lines written after a checkpoint; they will be written again.

        Returns:
            A warning if lines from before the checkpoint are missing; else "".
        """
        gone = not os.path.lexists(self.path) or self.length() == 0
        end = self.truncate(length)
        if end == length:
            return ""
        if gone:
            return f"{self.path}: is gone, {length:,} bytes of lines with it"
        return f"{self.path}: {length - end:,} bytes of lines before the checkpoint are lost"

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines.

        Raises:
            MemtrainError: a line is not JSON, or has no stage or step; the file is too large.
        """
        records = super().read()
        for number, record in enumerate(records, 1):
            if not isinstance(record, dict) or not _has_place(record):
                raise MemtrainError(f"{self.path}: line {number} has no stage or no step")
        return records


def _has_place(record: dict[str, Any]) -> bool:
    """Whether a record names its stage and steps."""
    counters = (record.get("step"), record.get("total_steps"))
    return isinstance(record.get("stage"), str) and all(type(one) is int for one in counters)
