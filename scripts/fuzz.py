"""Damage files at random and check that each is accepted or refused with a short reason.

    python scripts/fuzz.py --cases 10000
    python scripts/fuzz.py --seed 7 --case 1234           # repeat one case
    python scripts/fuzz.py --cases 500 --kinds links pipes

A case is a copy of a run folder, a prepared data set, a reproduced figure or a raw data file in
which something was changed. Damaged (fuzz_damage.py): bytes flipped, cut, doubled or replaced,
JSON values swapped for others, a pickle put in a file's place; half of the changed checkpoints get
matching checksums, so that the code behind the checksums is reached too. Hostile
(fuzz_hostile.py): links, pipes, devices, bombs. It is then opened as a user would, and a resumed
run trains a step.

A case fails if it raises anything but a MemtrainError, takes too long or too much memory, opens a
pickle, imports a module named by a file, starts a process or writes a file outside the case's
folder, or if the error message is empty or longer than a few lines. Seed and number determine a
case.
"""

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import fuzz_damage as damage
import fuzz_hostile as hostile
import torch

from memtrain.config import Digits
from memtrain.errors import MemtrainError

LINES = 5
"""An error message has fewer."""
MEGABYTES = 1024
"""A case may take this much more address space."""
FILLED = 512
"""Megabytes: an out-of-memory error after allocating more than this came too late."""


class Kind(NamedTuple):
    """Something to damage, and how it is then used."""

    make: Callable[[Path], None]
    """Create the original, once."""
    act: Callable[[Path, Path, random.Random], None]
    """Copy it, damage the copy and use it."""
    weight: float = 3.0
    """Relative frequency."""
    seconds: float = 20.0
    """Timeout of a case."""


KINDS = {
    "run": Kind(damage.make_run, damage.fuzz_run),
    "writer": Kind(partial(damage.make_run, data=Digits()), damage.fuzz_writer),
    "config": Kind(damage.make_config, damage.fuzz_config),
    "store": Kind(damage.make_store, damage.fuzz_store),
    "file": Kind(damage.make_files, damage.fuzz_file),
    "links": Kind(hostile.make_folders, hostile.fuzz_links, 3.0, 10.0),
    "pipes": Kind(hostile.make_folders, hostile.fuzz_pipes, 3.0, 10.0),
    "reproduce": Kind(hostile.make_reproduced, hostile.fuzz_reproduced, 2.0, 10.0),
    "bombs": Kind(hostile.make_bombs, hostile.fuzz_bombs, 0.3, 10.0),
}


class Hang(BaseException):
    """A case exceeded its timeout."""


# --------------------------------------------------------------------------------------- bounds


class Watch:
    """Audit imports, processes and changed files while a case runs, and block forbidden ones."""

    STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "pty.spawn")
    RUNS = ("pickle.find_class", "webbrowser.open", "socket.connect", *STARTS)
    CHANGES = {"os.remove": (1, 1), "os.rename": (2, 2), "os.rmdir": (1, 1), "os.mkdir": (1, 2)}
    CHANGES |= {"os.truncate": (1, 2), "os.chmod": (1, 2), "os.link": (2, 2)}
    """Number of leading path arguments of each event, and index of its first folder descriptor."""
    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def __init__(self, allowed: Path) -> None:
        self.allowed = os.path.realpath(allowed)
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self.audit)
        sys.meta_path.insert(0, self)  # importlib.import_module raises no audit event

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Block forbidden imports; as a finder it never finds a module."""
        if self.on and name.split(".")[0] in damage.EVIL:
            self.forbid(f"import {name}")

    def audit(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        action = ""
        if event in self.RUNS:
            action = f"{event} {arguments[:2]}"
        elif event == "exec" and str(arguments[0].co_filename).startswith(self.allowed):
            action = f"runs {arguments[0].co_filename}"
        elif event == "open" and self._writes(*arguments[1:3]):
            follows = not (arguments[2] or 0) & (os.O_NOFOLLOW | os.O_EXCL)
            action = f"writes {arguments[0]}" if self._outside(arguments[0], follows) else ""
        elif event in self.CHANGES:
            paths, folders = self.CHANGES[event]
            if not any(type(one) is int and one >= 0 for one in arguments[folders:]):
                # A path relative to an open folder does not show where it is.
                changed = [path for path in arguments[:paths] if self._outside(path)]
                action = f"{event} {changed}" if changed else ""
        if action:
            self.forbid(action)

    def forbid(self, action: str) -> None:
        self.seen.append(action)
        raise PermissionError(f"forbidden: {action}")

    def _writes(self, mode: object, flags: object) -> bool:
        by_mode = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        return by_mode or (isinstance(flags, int) and bool(flags & self.WRITES))

    def _outside(self, path: object, follows: bool = False) -> bool:
        """Whether a path leads out of the case; a link at its end may be replaced or removed."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        place = os.path.join(os.path.realpath(folder), name)
        place = os.path.realpath(place) if follows else place
        torch_cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", self.allowed)
        own = (self.allowed, torch_cache, "/dev/null", "/proc/")
        return not place.startswith(own)


def hang(number: int, frame: object) -> None:
    raise Hang


def one_case(act: Callable[[], None], watch: Watch, seconds: float = 20.0) -> tuple[str, str]:
    """Run a case: taken, refused or failed, and the message."""
    watch.seen.clear()
    before = start_of_peak()
    watch.on = True
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        act()
        ended = "taken", ""
    except MemtrainError as error:
        text = str(error)
        plain = text.strip() and text.count("\n") < LINES and len(text) < LINES * 200
        ended = (
            ("refused", text) if plain else ("failed", f"refused without a short message: {text!r}")
        )
    except Hang:
        ended = "failed", "hangs\n" + traceback.format_exc()
    except BaseException:
        ended = "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.on = False
    grown = (peak_memory() - before) / 2**20
    if ended[0] == "refused" and "not enough memory" in ended[1] and grown > FILLED:
        ended = "failed", f"took {grown:.0f} MB before the error: {ended[1]}"
    return ("failed", "; ".join(watch.seen)) if watch.seen else ended


def peak_memory() -> int:
    """Peak resident memory since `start_of_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def start_of_peak() -> int:
    """Reset the peak; return the memory in use now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def bound_memory(megabytes: int) -> None:
    """Limit the address space to the current size plus this much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def warm_up(root: Path, chosen: dict[str, Kind]) -> None:
    """Create the originals, and use them a few times so that lazy imports happen now."""
    bound_memory(4 * MEGABYTES)
    for name, kind in chosen.items():
        kind.make(root / name)
        for seed in range(0 if name == "bombs" else 8):
            signal.setitimer(signal.ITIMER_REAL, 5)
            with contextlib.suppress(Exception, Hang):
                kind.act(root / name, root / "warm" / "case", random.Random(seed))
            signal.setitimer(signal.ITIMER_REAL, 0)
            shutil.rmtree(root / "warm", ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run only this case")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--show", type=int, default=3, help="number of failures to print")
    options = parser.parse_args(arguments)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # others reserve address space
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    chosen = {name: KINDS[name] for name in options.kinds}
    weights = [kind.weight for kind in chosen.values()]
    numbers = range(options.cases) if options.case is None else [options.case]
    counts: Counter[str] = Counter()
    reasons: set[str] = set()
    slowest, failures = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        # torch's compiler, used to count parameters of large models, needs a cache folder.
        (root / "torch").mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "torch")
        warm_up(root, chosen)
        case = root / "case" / "files"
        watch = Watch(case.parent)
        bound_memory(MEGABYTES)
        for number in numbers:
            rng = random.Random(options.seed * 1_000_003 + number)
            kind = rng.choices(list(chosen), weights)[0]
            case.parent.mkdir()
            began = time.monotonic()
            act = partial(chosen[kind].act, root / kind, case, rng)
            ended, message = one_case(act, watch, chosen[kind].seconds)
            slowest = max(slowest, time.monotonic() - began)
            counts[f"{kind} {ended}"] += 1
            if ended == "refused":
                reasons.add(message.replace(str(root), "")[:60])
            failures += ended == "failed"
            if ended == "failed" and failures <= options.show:
                print(
                    f"case {number} ({kind}) of seed {options.seed} failed:\n{message}", flush=True
                )
            shutil.rmtree(case.parent, ignore_errors=True)
            if (number + 1) % 1000 == 0:
                print(f"{number + 1} cases, {failures} failed", flush=True)
    print({key: counts[key] for key in sorted(counts)})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{len(numbers)} cases, {failures} failed; {len(reasons)} different reasons; "
        f"slowest {slowest:.2f} s, peak {peak:.0f} MB"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
