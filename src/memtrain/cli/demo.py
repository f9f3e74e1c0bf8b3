"""memtrain demo."""

import sys
from dataclasses import dataclass
from pathlib import Path

from memtrain.cli.args import parse


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

    from memtrain.cli.suggest import command_name
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
