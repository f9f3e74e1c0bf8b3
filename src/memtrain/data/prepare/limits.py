"""Limits on untrusted files: unpacked bytes, memory, and the number of files."""

import os
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from memtrain.errors import MemtrainError, printable

GROWTH = 200
"""Real text and images unpack to less than this many times their size."""
FREE = 2**26
"""Bytes that any file may unpack to."""
MAX_FILES = 2**22
"""Files in a folder, whose names are all held in memory."""

CGROUP = Path("/sys/fs/cgroup")
"""The limits of a container, on Linux."""


class Budget:
    """A limit on the sum over several files, such as of their unpacked bytes."""

    def __init__(self, where: str, limit: int, rule: str, remedy: str) -> None:
        """
        Args:
            where: begins the error.
            limit: the largest sum.
            rule: describes the violation in the error.
            remedy: ends the error.
        """
        self.where, self.limit, self.rule, self.remedy = where, limit, rule, remedy
        self.spent = 0

    def spend(self, count: int) -> None:
        """Add to the sum; a MemtrainError if it exceeds the limit."""
        self.spent += count
        if self.spent > self.limit:
            raise MemtrainError(f"{self.where}: refused, {self.rule}; {self.remedy}")


def unpack_budget(where: str, packed: int, remedy: str) -> Budget:
    """The budget of unpacked bytes for files of `packed` bytes."""
    limit = max(FREE, GROWTH * packed)
    rule = f"unpacks to more than {limit:,} bytes, over {GROWTH} times its size"
    return Budget(where, limit, rule, remedy)


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, as far as known."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    with suppress(OSError, ValueError, KeyError):  # of a container; "max" where it has no limit
        limit = int((CGROUP / "memory.max").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["file"])  # released under memory pressure
        used = int((CGROUP / "memory.current").read_text()) - cached
        free = min(free, max(0, limit - used))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free = min(free, max(0, limit - pages * resource.getpagesize()))
    return free


def require_memory(needed: int, where: str, remedy: str) -> None:
    """Refuse an allocation that would not fit in memory, before it is made."""
    available = available_memory()
    if needed > available:
        raise too_large(where, needed, available, remedy)


def too_large(where: str, needed: int, available: int, remedy: str) -> MemtrainError:
    """The error for data that does not fit in memory."""
    return MemtrainError(
        f"{where}: needs {needed / 2**30:,.1f} GiB of memory or more, {available / 2**30:,.1f} GiB "
        f"are available; {remedy}"
    )


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder and its subfolders."""

    names: list[str]
    """Relative to the folder, in no order. Hidden files and folders are left out."""
    others: Counter[str] = field(default_factory=Counter)
    """The number of other entries by kind."""


def list_files(folder: Path) -> Listing:
    """List the regular files under a folder; a link to a file counts, one to a folder does not.

    Nor do runs in it: their logs and figures are no data.
    """
    found = Listing([])
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(folder / inside) as entries:
                seen = [entry for entry in entries if not entry.name.startswith(".")]
            names = {entry.name for entry in seen}
            if inside and "config.json" in names and names & {"run.json", "metrics.jsonl"}:
                found.others["runs of memtrain"] += 1
                continue
            for entry in seen:
                _sort(entry, inside + entry.name, found, waiting)
        except OSError as error:
            raise MemtrainError(f"{folder / inside}: {error.strerror or error}") from None
        if len(found.names) + len(waiting) > MAX_FILES:
            raise MemtrainError(
                f"{folder}: holds more than {MAX_FILES:,} files; split it into smaller folders"
            )
    return found


def _sort(entry: os.DirEntry[str], name: str, found: Listing, waiting: list[str]) -> None:
    if entry.is_file():
        found.names.append(name)
    elif entry.is_dir(follow_symlinks=False):
        waiting.append(f"{name}/")
    elif entry.is_dir():
        found.others["linked folders"] += 1
    else:
        found.others["broken links" if entry.is_symlink() else "special files"] += 1


def suffix_of(name: str) -> str:
    """A file's suffix in lower case; two if the last is .gz."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def one_line(name: str) -> str:
    """A name from a folder or an archive, safe to print on one line."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def name_some(names: Sequence[str]) -> str:
    """The first five names, for a note."""
    return ", ".join(map(one_line, names[:5])) + (", ..." if len(names) > 5 else "")


def ignored_note(counts: Mapping[str, int]) -> tuple[str, ...]:
    """A note on files that were passed over, by suffix, if there are any."""
    total = sum(counts.values())
    files = "1 file" if total == 1 else f"{total:,} files"
    return (f"passed over {files}: {count_kinds(counts)}",) if total else ()


def count_kinds(counts: Mapping[str, int]) -> str:
    """Counts by suffix in words, the five most common by name."""
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{count:,} {one_line(what or 'without a suffix')}" for what, count in common[:5]]
    rest = sum(count for _, count in common[5:])
    return ", ".join(named) + (f" and {rest:,} others" if rest else "")
