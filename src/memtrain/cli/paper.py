"""memtrain demo, reproduce and report: do the paper's claims hold here?"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from memtrain.cli.args import command_name, parse
from memtrain.errors import MemtrainError


@dataclass(frozen=True)
class _DemoOptions:
    """Remember a token of the first half of a sequence. Trains the same cell by SMT -> DMT and by
    BPTT at three learning rates (each for as many steps or as many seconds, whichever takes
    longer); compares them in a table and an HTML page."""

    folder: Path = Path("runs/demo")
    """Folder for the runs and the page; an earlier demo there is replaced."""
    seed: int = 0
    """The same seed gives the same runs."""
    length: int = 32
    """Tokens per sequence; the longer, the harder for BPTT."""


@dataclass(frozen=True)
class _ReproduceOptions:
    """Train the runs of a figure, plot it, and check the paper's claim. Finished runs are skipped,
    a stopped sweep continues, a failed run does not stop the others. The scale smoke is too small
    to check any claim."""

    figures: tyro.conf.Positional[tuple[str, ...]]
    """Names from `memtrain reproduce`, all, or your class as my_file:MyFigure."""
    scale: Literal["smoke", "cpu", "gpu", "paper"] = "smoke"
    """smoke: seconds, shows that it works; cpu: minutes to an hour; gpu: minutes on a large GPU;
    paper: the paper's sizes, days."""
    folder: Path | None = None
    """Folder for results, runs and plots (default: runs/reproduce-SCALE)."""
    launcher: Literal["local", "ray", "slurm"] = "local"
    """Processes of this machine, or a cluster whose machines all see the folder: Ray, or jobs of
    Slurm."""
    address: str = ""
    """Address of the Ray cluster (default: start one here)."""
    slurm: dict[str, str] = field(default_factory=dict)
    """Options of the Slurm jobs, as of sbatch: --slurm partition gpu time 240 gpus-per-node 1."""
    processes: int | None = None
    """Runs in parallel (default: one per core; on a GPU at most 12, and one per 10 GiB; at the
    scale paper one; 16 jobs of Slurm)."""
    mps: bool = True
    """Share an NVIDIA GPU between runs through its Multi-Process Service, if that can be started;
    it ends with the command."""
    minutes: float = math.inf
    """Start no more runs after this many minutes; the same command continues later. 0 only
    plots."""
    data_dir: Path = Path("data")
    """Folder in which `memtrain data` prepared mnist, tinystories and sketchy (scales gpu and
    paper)."""
    device: str = "auto"
    """auto: a GPU if there is one; or cpu, cuda, cuda:1, ..."""
    json: bool = False
    """Print one JSON object with all verdicts as the last line of stdout, and nothing else
    there."""

    def __post_init__(self) -> None:
        if not self.figures:
            raise MemtrainError("figures: name at least one, or all; memtrain reproduce lists them")
        if self.processes is not None and self.processes < 1:
            raise MemtrainError(f"processes={self.processes}: must be at least 1")
        if self.slurm and self.launcher != "slurm":
            raise MemtrainError("--slurm: is for --launcher slurm; leave one of them out")
        if not self.minutes >= 0:
            raise MemtrainError(f"minutes={self.minutes}: must be at least 0")


@dataclass(frozen=True)
class _ReportOptions:
    """Write one self-contained HTML page: every reproduced figure with its verdict, seeds, spread
    and cost, and each run with its curves and config."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of `memtrain reproduce` (default: all runs/reproduce-*)."""
    out: Path | None = None
    """The page (default: report.html in the first folder)."""
    allow_code: bool = False
    """Import your own figure classes that a folder names (my_file:MyFigure); the page leaves them
    out otherwise. Only for folders that you trust."""


def demo(arguments: list[str]) -> int:
    """Compare SMT -> DMT with BPTT on the same cell."""
    options = parse(_DemoOptions, arguments, "memtrain demo")

    import torch

    from memtrain.demo import run_demo
    from memtrain.runs.processes import Interrupted, cores, exit_status
    from memtrain.training.console import make_reporter

    try:
        run_demo(
            options.folder,
            options.seed,
            options.length,
            make_reporter,
            # On one core or one GPU they would slow each other down.
            processes=1 if torch.cuda.is_available() else cores(),
            command=command_name(),
        )
    except Interrupted as interrupted:
        print("memtrain: stopped; the demo starts from scratch next time", file=sys.stderr)
        return exit_status(interrupted)
    return 0


def reproduce(arguments: list[str]) -> int:
    """Train the runs of a figure, plot it, and check the paper's claim."""
    from memtrain.paper import FIGURES, MORE

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: memtrain reproduce FIGURE...|all [OPTIONS]\n\nFigures:")
        for name, title in FIGURES.items():
            print(f"  {name:<20}{title}")
        print("\nNot in the paper, and not part of `all`:")
        for name, title in MORE.items():
            print(f"  {name:<20}{title}")
        print(
            "\nSeveral figures share their processes. Your own class is my_file:MyFigure."
            "\nStart with `memtrain reproduce gradients` (seconds), then"
            "\n  memtrain reproduce all --scale smoke       all fifteen, minutes on a laptop"
            "\n  memtrain reproduce joint --scale cpu       minutes, small but real"
            "\n  memtrain reproduce synthetic --scale gpu   on a GPU, several runs at once"
            "\nFinished runs are kept: the same command continues where it was stopped."
            "\n`memtrain reproduce FIGURE --help` lists the options."
        )
        return 0 if arguments else 2
    options = parse(_ReproduceOptions, arguments, "memtrain reproduce")

    from memtrain.paper.reproduce import run_reproduce

    return run_reproduce(options)


def report(arguments: list[str]) -> int:
    """Write one page about everything that was reproduced."""
    options = parse(_ReportOptions, arguments, "memtrain report")

    from memtrain.paper.report import run_report

    return run_report(options.folders, options.out, options.allow_code)
