"""Mutation testing: break the program one line at a time, and check that a test fails.

    python scripts/mutate.py                    # every mutation, with its own tests
    python scripts/mutate.py --whole            # run all other tests on survivors
    python scripts/mutate.py --only smt-joint losses-decode-mean
    python scripts/mutate.py --jobs 8           # eight at a time, each with one thread

The mutations are those of scripts/mutations.py. Each is applied in a temporary copy of the tree,
never in the tree itself. First the tests run on an unchanged copy: a suite that already fails
would kill every mutation. A mutation that no test detects survives; up to `--allowance` may. One
whose snippet is no longer in the source counts as a survivor, since it tests nothing until
scripts/mutations.py is updated.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "runs", "data", "build", "dist", "__pycache__", ".*_cache")
QUICK = "not slow and not gpu"
SECONDS = 600.0
"""Timeout of the tests; a timeout kills the mutation."""


class Verdict(NamedTuple):
    """The outcome of one mutation."""

    mutation: Mutation
    state: str
    """killed, survived or not found."""
    by: str
    """The test that failed, or the problem."""
    seconds: float


class Copy:
    """A temporary copy of the tree, in which mutations are applied."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(root, folder, ignore=_left_out, symlinks=True)

    def place(self, mutation: Mutation) -> Path:
        """The file with the mutation's snippet: the one it names, or the only one that has it.

        Raises:
            LookupError: no file has it once, or several do.
        """
        named = self.folder / "src" / "memtrain" / mutation.file
        if named.is_file() and (count := named.read_text().count(mutation.find)):
            if count > 1:
                raise LookupError(f"{mutation.file}: {count} times there, must be once")
            return named
        others = [
            path
            for path in sorted((self.folder / "src").rglob("*.py"))
            if path.read_text().count(mutation.find) == 1
        ]
        if len(others) != 1:
            raise LookupError(f"{mutation.file}: snippet not found, or in {len(others)} files")
        return others[0]

    def test(self, files: Sequence[str], *options: str) -> tuple[int, str]:
        """Run tests of this copy; returns pytest's status and its output."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-m", QUICK]
        command += ["-p", "no:cacheprovider", *options, *files]
        capture: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        capture |= {"text": True, "errors": "replace", "timeout": SECONDS}
        try:
            done = subprocess.run(command, cwd=self.folder, env=environment, **capture)
        except subprocess.TimeoutExpired:
            return 1, "FAILED (hangs)"
        return done.returncode, done.stdout

    def try_out(self, mutation: Mutation, whole: bool) -> Verdict:
        """Apply a mutation, run the tests, and revert it."""
        began = time.monotonic()
        try:
            path = self.place(mutation)
        except LookupError as error:
            return Verdict(mutation, "not found", str(error), 0.0)
        source = path.read_text()
        try:
            _write(path, source.replace(mutation.find, mutation.replace))
            mirrored = existing(self.folder, mutation.tests)
            status, output = self.test(mirrored) if mirrored else (0, "")
            if status == 0 and whole:
                status, output = self.test(["tests"], *(f"--ignore={file}" for file in mirrored))
        finally:
            _write(path, source)
        state = "killed" if status else "survived"
        return Verdict(mutation, state, noticed_by(output, status), time.monotonic() - began)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Names that are not copied; `data` only at the top, since the package has a folder data."""
    top = Path(folder).resolve() == ROOT
    anywhere = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", ".venv")(folder, names)
    return set(anywhere) | (set(shutil.ignore_patterns(*LEFT_OUT)(folder, names)) if top else set())


def _write(path: Path, source: str) -> None:
    """Write a source file and remove its bytecode, whose timestamp only has whole seconds."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def existing(folder: Path, tests: Sequence[str]) -> list[str]:
    """The test files that exist, relative to the tree."""
    return [f"tests/{name}" for name in tests if (folder / "tests" / name).is_file()]


def noticed_by(output: str, status: int) -> str:
    """Which test failed, from pytest's summary."""
    if status == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    if found:
        return found[1].removeprefix("tests/")
    return f"pytest ended with status {status}: {' '.join(output.split())[-120:]}"


def check_unchanged(copy: Copy, chosen: Sequence[Mutation]) -> None:
    """Exit if the tests fail without any mutation, or import another memtrain."""
    code = "import memtrain, sys; sys.stdout.write(memtrain.__file__)"
    source = str(copy.folder / "src")
    environment = os.environ | {"PYTHONPATH": source}
    where = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    if not where.startswith(source):
        sys.exit(f"tests would import {where}, not the copy's")
    files = existing(copy.folder, list(dict.fromkeys(t for one in chosen for t in one.tests)))
    status, output = copy.test(files)
    if status:
        sys.exit(f"the tests fail without any mutation: {noticed_by(output, status)}")


def run(root: Path, chosen: Sequence[Mutation], jobs: int, *, whole: bool, check: bool = True):
    """Yield the verdicts on some mutations."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(min(jobs, len(chosen))):
            copies.put(Copy(root, Path(name).resolve() / str(number)))
        if check:
            check_unchanged(copies.queue[0], chosen)

        def one(mutation: Mutation) -> Verdict:
            copy = copies.get()
            try:
                return copy.try_out(mutation, whole)
            finally:
                copies.put(copy)

        yield from pool.map(one, chosen)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these mutations")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel jobs")
    parser.add_argument("--whole", action="store_true", help="run all other tests on survivors")
    parser.add_argument("--allowance", type=int, default=0, help="number of allowed survivors")
    parser.add_argument(
        "--unchecked", action="store_true", help="skip the tests of the unchanged copy"
    )
    options = parser.parse_args(arguments)
    known = {one.name: one for one in MUTATIONS}
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.only] if options.only else MUTATIONS
    verdicts = []
    check = not options.unchecked
    for verdict in run(ROOT, chosen, options.jobs, whole=options.whole, check=check):
        verdicts.append(verdict)
        mutation, state, by, seconds = verdict
        detail = by if state == "killed" else f"{mutation.fault} {by and f'({by})'}"
        shown = state if state == "killed" else state.upper()
        print(f"{mutation.name:<28} {shown:<10} {seconds:5.0f} s  {detail}", flush=True)
    left = [one.mutation.name for one in verdicts if one.state != "killed"]
    print(
        f"{len(verdicts)} mutations, {len(verdicts) - len(left)} killed, {len(left)} survived "
        f"({options.allowance} allowed){': ' if left else ''}{', '.join(left)}"
    )
    return int(len(left) > options.allowance)


if __name__ == "__main__":
    sys.exit(main())
