"""metrics.jsonl: what a run writes down while it runs, for programs."""

import json
import os
from pathlib import Path

from memtrain.errors import MemtrainError


def _counted(record: dict) -> bool:
    """Whether it says where it belongs."""
    counters = (record.get("step"), record.get("total_steps"))
    return isinstance(record.get("stage"), str) and all(type(one) is int for one in counters)


class MetricsFile:
    """One JSON object a line, appended; cut back to a checkpoint's length on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise MemtrainError(f"{self.path}: {error.strerror}; mend that, then resume") from None

    def length(self) -> int:
        """The file's length in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """Force all lines to disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, length: int) -> str:
        """Forget what was written after a checkpoint: it will be written again.

        Returns:
            What is wrong with the lines before, in words; nothing if all are there.
        """
        found = self.length()
        if found > length:
            os.truncate(self.path, length)
        if found == 0 or length == 0:
            return f"{self.path}: is gone, {length:,} bytes of lines with it" if length else ""
        with self.path.open("rb") as file:
            whole = file.read().rfind(b"\n") + 1
        os.truncate(self.path, whole)
        if whole == length:
            return ""
        return f"{self.path}: {length - whole:,} bytes of lines before the checkpoint are lost"

    def read(self) -> list[dict]:
        """All whole lines; one that is being written, or was torn, is not there yet.

        Raises:
            MemtrainError: a line is no JSON, or no line of metrics.
        """
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        records = []
        for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise MemtrainError(f"{self.path}: line {number} is no JSON") from None
            if not isinstance(record, dict) or not _counted(record):
                raise MemtrainError(f"{self.path}: line {number} has no stage or no step")
            records.append(record)
        return records
