"""memtrain demo, reproduce and report: does the paper's claim hold here?"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from memtrain.cli.args import command_name, parse
from memtrain.errors import MemtrainError


def demo(arguments: list[str]) -> int:
    """SMT -> DMT against BPTT on the same cell."""

    @dataclass(frozen=True)
    class Demo:
        """Remember one token over many steps. The same cell is trained by SMT -> DMT and by BPTT
        (for the longer of equal steps and equal seconds); a table and a page tell."""

        folder: Path = Path("runs/demo")
        """Where the two runs and the page go; what a demo left there is replaced."""
        seed: int = 0
        """Everything random follows from this."""
        length: int = 32
        """Tokens in a sequence; the longer, the harder for BPTT."""

    options = parse(Demo, arguments, "memtrain demo")

    import torch

    from memtrain.demo import run_demo
    from memtrain.training.console import make_reporter
    from memtrain.training.processes import Interrupted, cores, exit_status

    try:
        # A GPU would be shared, one core too; then one trains after the other.
        alongside = cores() > 1 and not torch.cuda.is_available()
        run_demo(
            options.folder,
            options.seed,
            options.length,
            make_reporter,
            alongside=alongside,
            command=command_name(),
        )
    except Interrupted as interrupted:
        print("memtrain: stopped; the demo starts anew next time", file=sys.stderr)
        return exit_status(interrupted)
    return 0


def reproduce(arguments: list[str]) -> int:
    """Run a figure's grid, draw it, and say in numbers whether the paper's claim holds."""
    from memtrain.paper import FIGURES

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: memtrain reproduce FIGURE...|all [OPTIONS]\n\nFigures:")
        for name, title in FIGURES.items():
            print(f"  {name:<20}{title}")
        print(
            "\nSeveral figures share their processes. A class of yours is my_file:MyFigure."
            "\nStart with `memtrain reproduce gradients` (seconds), then"
            "\n  memtrain reproduce all --scale smoke       all fifteen, minutes on a laptop"
            "\n  memtrain reproduce joint --scale cpu       minutes, small but real"
            "\n  memtrain reproduce synthetic --scale gpu   on a GPU, several runs at once"
            "\nWhat is done stays done: the same command continues where it was stopped."
            "\n`memtrain reproduce FIGURE --help` lists the options."
        )
        return 0 if arguments else 2

    import tyro

    @dataclass(frozen=True)
    class Reproduce:
        """Run the grid of a figure, draw it, and say whether the paper's claim holds here.
        Finished runs are skipped, a stopped sweep continues, a failed run does not stop the rest.
        The scale smoke is too small to judge any claim."""

        figures: tyro.conf.Positional[
            Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIGURE...")]
        ]
        """Names from `memtrain reproduce`, all, or my_file:MyFigure."""
        scale: Literal["smoke", "cpu", "gpu", "paper"] = "smoke"
        """smoke: seconds, shows that it works; cpu: minutes to an hour; gpu: minutes of a large
        GPU; paper: the paper's sizes, days."""
        folder: Path | None = None
        """Where results, runs and pictures go; runs/reproduce-SCALE unless given."""
        launcher: Literal["local", "ray"] = "local"
        """Processes of this machine, or a Ray cluster whose machines all see the folder."""
        address: str = ""
        """Of the Ray cluster; without it one is started here."""
        processes: int | None = None
        """Runs at a time: as many as there are cores, unless given; on a GPU at most 12 and 10 GiB
        each, at the scale paper one."""
        mps: bool = True
        """Let kernels of several runs share an NVIDIA GPU, where its Multi-Process Service can be
        started; it ends with the command."""
        minutes: float = math.inf
        """After that many minutes no run is begun; the same command continues later. 0 only
        draws."""
        data_dir: Path = Path("data")
        """Where `memtrain data` put mnist, tinystories and sketchy (scales gpu and paper)."""
        device: str = "auto"
        """auto takes a GPU if there is one; else cpu, cuda, cuda:1, ..."""
        json: bool = False
        """Print one JSON object of all verdicts as the last line of stdout, nothing else there."""

    options = parse(Reproduce, arguments, "memtrain reproduce")
    if not options.figures:
        raise MemtrainError("figures: name at least one, or all; memtrain reproduce lists them")
    if options.processes is not None and options.processes < 1:
        raise MemtrainError(f"processes={options.processes}: must be at least 1")
    if not options.minutes >= 0:
        raise MemtrainError(f"minutes={options.minutes}: must be at least 0")

    from memtrain.paper.reproduce import run_reproduce

    return run_reproduce(options)


def report(arguments: list[str]) -> int:
    """One page of all that was reproduced."""
    import tyro

    @dataclass(frozen=True)
    class Report:
        """Write one HTML page, which needs nothing else: every figure that was reproduced, its
        verdict, seeds and spread, the cost, and each run with its curves and config."""

        folders: tyro.conf.Positional[
            Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[FOLDER...]")]
        ] = ()
        """Folders that `memtrain reproduce` filled; all of runs/reproduce-* unless given."""
        out: Path | None = None
        """The page; report.html in the first folder unless given."""
        allow_code: bool = False
        """Import the figures of yours that a folder names (my_file:MyFigure); without it the page
        leaves them out. Only for folders that you trust."""

    options = parse(Report, arguments, "memtrain report")

    from memtrain.paper.report import run_report

    return run_report(options.folders, options.out, options.allow_code)
