"""memtrain race."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from memtrain.cli.args import command_name, parse
from memtrain.config.validation import check_device
from memtrain.errors import MemtrainError, printable
from memtrain.files import strict_json
from memtrain.recipes.sizes import size_named


@dataclass(frozen=True)
class _RaceOptions:
    """Find out which method is best for your data on this machine. SMT -> DMT, SMT in
    segments, BPTT with a Transformer cell, a GRU and an LSTM, BPTT in pieces, and a plain causal
    Transformer are trained one after another for the same time, with equally many parameters and
    three learning rates each; count models and the compressor PPMd are scored beside them. Start-up
    and evaluations are outside of the clock. The same command continues a stopped race.
    docs/RACE.md explains the result."""

    data: tyro.conf.Positional[Path]
    """Your text, images or tokens, or prepared data."""
    minutes: float = 10.0
    """Minutes of training of all networks together."""
    size: str = "small"
    """Size of the networks: paper, medium, small or tiny."""
    methods: str = ""
    """Which networks, as gru,attention: of smt-dmt, smt, bptt, gru, lstm, pieces and attention
    (default: all)."""
    folder: Path | None = None
    """Folder for the runs, the figure and race.json (default: runs/race-NAME)."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the data preparation, for example --option size 28 levels 16."""
    seed: int = 0
    """Of all networks."""
    device: str = "auto"
    """auto: a GPU if there is one; or cpu, cuda, cuda:1, ..."""
    threads: int = 0
    """CPU threads (0: one per core); 1 where other programs use the cores too."""
    overwrite: bool = False
    """Delete the race that is in the folder."""
    json: bool = False
    """Print one JSON object as the last line of stdout, and nothing else there."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise MemtrainError(f"--minutes={self.minutes:g}: must be above 0, for example 10")
        if not 0 <= self.threads <= 4096:
            raise MemtrainError(f"--threads={self.threads}: must be from 0 (one per core) to 4096")
        if not 0 <= self.seed < 2**31:
            raise MemtrainError(f"--seed={self.seed}: must be at least 0 and below 2**31")
        size_named(self.size)
        check_device(self.device)


def race(arguments: list[str]) -> int:
    """Train several methods for the same time and say which one to take."""
    options = parse(_RaceOptions, arguments, "memtrain race")

    from rich.console import Console

    from memtrain.demo.race import RaceOptions, run_race
    from memtrain.demo.race.report import (
        notes_of_race,
        race_json,
        race_table,
        ranked_networks,
        verdict_of_race,
    )
    from memtrain.runs.processes import Interrupted, exit_status
    from memtrain.training.console import make_reporter

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    chosen = {name: getattr(options, name) for name in RaceOptions.__dataclass_fields__}
    chosen["methods"] = [name.strip() for name in options.methods.split(",") if name.strip()]
    try:
        done, unit = run_race(RaceOptions(**chosen), lambda: make_reporter(transient=True), say)
    except Interrupted as stopped:
        print(f"memtrain: {stopped}; the same command continues the race", file=sys.stderr)
        return exit_status(stopped)
    if options.json:
        print(strict_json(race_json(done, unit)), flush=True)
        return 0
    console = Console(highlight=False, markup=False)
    console.print(race_table(done, unit))
    for note in notes_of_race(done):
        console.print(f"Note: {note}.")
    console.print(f"\n{verdict_of_race(done, unit)}\n")
    runs = " ".join(f"{done.folder}/{name}" for name in done.plan.methods)
    print(f"figure    {done.folder}/race.png, race.svg")
    for one in ranked_networks(done)[1][:1]:
        print(f"generate  {command_name()} generate {done.folder}/{one.key}")
    print(f"compare   {command_name()} compare {runs}")
    return 0
