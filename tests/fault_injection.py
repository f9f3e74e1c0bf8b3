"""A disk that fails: at the n-th operation, before it, in the middle of it, or with an error."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from memtrain.runs.checkpoint import Files


class Crash(BaseException):
    """The process is gone, or the power is."""


class Entry(NamedTuple):
    """A change of a folder's entries that is not on disk until the folder is synced."""

    path: Path
    """What was made, or what it is called now."""
    before: Path | None = None
    """What it was called."""

    def moved(self, old: Path, new: Path) -> "Entry":
        """The same after one of the folders above it got another name."""
        if self.path == old or not self.path.is_relative_to(old):
            return self
        return Entry(new / self.path.relative_to(old), self.before)

    def undo(self) -> None:
        if self.before is not None and self.path.exists():
            self.path.rename(self.before)
        elif self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


class FaultyFiles(Files):
    """Does what `Files` does until operation `at`; then nothing more gets through.

    Args:
        at: which operation fails; none if negative. `operations` counts them.
        fault: "before" and "inside" crash there; a number is raised as an OSError, once.
        power_cut: what was not synced when the crash came is lost: the content of files, and
            what was made or renamed in folders. What was removed stays removed.
    """

    def __init__(self, at: int = -1, fault: str | int = "before", power_cut: bool = False) -> None:
        self.at = at
        self.fault = fault
        self.power_cut = power_cut
        self.operations: list[str] = []
        self.unsynced: set[Path] = set()
        self.entries: list[Entry] = []

    def _begin(self, name: str, path: Path) -> bool:
        """Count an operation; returns whether it shall break off in the middle."""
        number = len(self.operations)
        self.operations.append(f"{name} {path.name}")
        if 0 <= self.at <= number:
            if isinstance(self.fault, int):
                if number == self.at:
                    raise OSError(self.fault, os.strerror(self.fault), str(path))
                return False
            if self.fault == "inside" and number == self.at:
                return True
            self.crash()
        return False

    def crash(self) -> None:
        if self.power_cut:
            for path in self.unsynced:
                if path.is_file():
                    os.truncate(path, 0)
            for entry in reversed(self.entries):
                entry.undo()
        raise Crash(self.operations[-1])

    def make_folder(self, path: Path) -> None:
        inside = self._begin("make", path)
        if not path.exists():
            self.entries.append(Entry(path))
        super().make_folder(path)
        if inside:
            self.crash()

    def write(self, path: Path, content: bytes) -> None:
        inside = self._begin("write", path)
        self.unsynced.add(path)
        self.entries.append(Entry(path))
        super().write(path, content[: len(content) // 2] if inside else content)
        if inside:
            self.crash()

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        inside = self._begin("write", path)
        self.unsynced.add(path)
        self.entries.append(Entry(path))
        digest = super().write_tensors(path, tensors)
        if inside:
            os.truncate(path, path.stat().st_size // 2)
            self.crash()
        return digest

    def sync(self, path: Path) -> None:
        if self._begin("sync", path):
            self.crash()
        self.unsynced.discard(path)
        self.entries = [entry for entry in self.entries if entry.path.parent != path]

    def rename(self, path: Path, target: Path) -> None:
        inside = self._begin("rename", path)
        super().rename(path, target)
        moved = {old for old in self.unsynced if old.is_relative_to(path)}
        self.unsynced = (self.unsynced - moved) | {target / old.relative_to(path) for old in moved}
        self.entries = [entry.moved(path, target) for entry in self.entries]
        self.entries.append(Entry(target, path))
        if inside:
            self.crash()

    def remove(self, path: Path) -> None:
        if self._begin("remove", path):
            for name in sorted(path.iterdir())[:1] if path.is_dir() else []:
                super().remove(name)
            self.crash()
        super().remove(path)


ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}
