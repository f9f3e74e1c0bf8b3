"""Time memtrain on an idle and on a busy machine, for each wait policy of OpenMP's threads.

    python scripts/busy.py                         # torch's defaults, and memtrain's
    python scripts/busy.py --settings passive one-thread 1000 10000 --repeat 5

The machine is kept busy by one spinning process per core. Settings
alternate, so that other load on the machine affects all of them. A number is a GOMP_SPINCOUNT.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memtrain.runs.processes import cores

SETTINGS = {
    "torch": {"GOMP_SPINCOUNT": "300000"},  # libgomp's default
    "memtrain": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one-thread": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "KMP_BLOCKTIME")
COMMANDS = {
    "generate": "generate mnist-small --count 16 --out digits.png",
    "train": "train text --data book.txt --size tiny --smt.steps 60 --dmt.steps 10 --folder run",
}


def take_time(command: str, setting: str, folder: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a command, including its start-up."""
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= SETTINGS.get(setting) or (
        {"GOMP_SPINCOUNT": setting} if setting.isdecimal() else {}
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "memtrain", *COMMANDS[command].split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"memtrain {COMMANDS[command]}: exit status {process.returncode}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the given number of cores busy."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["torch", "memtrain"])
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=COMMANDS)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, cores()])
    options = parser.parse_args()
    words = "the quick brown fox jumps over a lazy dog while rain falls on seven hills".split()  # noqa: SIM905
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "\n".join(" ".join(words[(i * k) % 15] for k in range(1, 9)) for i in range(4000))
        (folder / "book.txt").write_text(text)
        print(f"{cores()} cores, median of {options.repeat} (minimum to maximum), seconds")
        print(f"{'command':<10}{'busy':>5}  {'setting':<12}{'wall clock':>22}{'CPU':>22}")
        for command in options.commands:
            for processes in options.processes:
                taken = {setting: [] for setting in options.settings}
                with load(processes):
                    for _ in range(options.repeat):
                        for setting, times in taken.items():
                            times.append(take_time(command, setting, folder))
                for setting, times in taken.items():
                    columns = "".join(
                        f"{spread(list(one)):>22}" for one in zip(*times, strict=True)
                    )
                    print(f"{command:<10}{processes:>5}  {setting:<12}{columns}", flush=True)


def spread(seconds: list[float]) -> str:
    """Format the median, minimum and maximum."""
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


if __name__ == "__main__":
    main()
