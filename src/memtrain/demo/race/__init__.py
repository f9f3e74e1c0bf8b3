"""A race between methods on one machine and one data set, each for the same time.

SMT -> DMT, SMT in segments, BPTT with three cells and a plain Transformer are trained; count models
and PPMd, which need no training, are scored on the same held-out targets. docs/RACE.md explains how
to read it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memtrain.accel.engine import pick_device
from memtrain.config import Stream
from memtrain.data.prepare.cache import prepared_stream
from memtrain.data.prepare.file_kind import require_kind
from memtrain.data.store_reader import open_store
from memtrain.data.stream import StreamTask
from memtrain.demo.race.plan import (
    FIGURES,
    RaceFile,
    RacePlan,
    check_folder,
    check_methods,
    open_race,
    remove_race,
)
from memtrain.demo.race.report import race_figure
from memtrain.demo.race.training import Racing
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import COUNTED, EVALUATION_SEED
from memtrain.evaluation.ngram import count_baselines
from memtrain.evaluation.ppmd import MEMORY, ORDERS, SYMBOLS, ppmd_losses, ppmd_missing
from memtrain.files import refuse_links
from memtrain.plotting.style import save
from memtrain.recipes import recipe
from memtrain.runs.run_folder import is_run
from memtrain.shapes import IGNORE_INDEX
from memtrain.training.console import Reporter

GROUPS = 8
LEAST = 10
"""Held-out sequences that a race needs."""


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """What to race with, and where."""

    data: Path
    folder: Path | None
    minutes: float
    size: str
    methods: Sequence[str]
    option: dict[str, Any]
    seed: int
    device: str
    threads: int
    overwrite: bool


def run_race(
    options: RaceOptions,
    make_reporter: Callable[[], Reporter],
    say: Callable[[str], None],
) -> tuple[RaceFile, str]:
    """Train and score everything that is not done yet, and draw the figure.

    Args:
        options: checked by the command line.
        make_reporter: creates the progress display of one run.
        say: receives a line per part.

    Returns:
        The results, and the name of one target, as in "character".

    Raises:
        MemtrainError: the data or the folder is wrong.
        Interrupted: a signal; the same call continues.
    """
    methods, device = check_methods(options.methods), pick_device(options.device)
    if options.folder is not None:
        check_folder(options.folder)  # before the data is prepared, which can take long
    lines: list[str] = []
    kind, stream = _prepare(options, lines.append)
    if open_store(Path(stream.path)).splits["test"].tokens <= stream.evaluate_length:
        raise _too_little_held_out(stream, 0)
    task = StreamTask.from_config(stream)
    counts = _held_out_counts(task, device)
    for line in lines:
        say(line)
    plan = RacePlan(
        store=stream.path,
        kind=kind,
        identity=task.identity,
        length=task.sequence_length,
        minutes=options.minutes,
        size=options.size,
        seed=options.seed,
        device=str(device),
        threads=options.threads,
        methods=methods,
        **counts,
    )
    folder = options.folder or Path("runs") / f"race-{Path(stream.path).name.rpartition('-')[0]}"
    if options.overwrite:
        remove_race(folder)
    race = open_race(folder, plan)
    race.write()
    for name, score in (("counts", score_counts), ("ppmd", score_ppmd)):
        if name not in race.results:
            say(f"{'PPMd' if name == 'ppmd' else 'Count models'} on the held-out sequences")
            race.results[name] = score(task, plan)
            race.write()
    Racing(race, task.vocab_size, make_reporter, say).train()
    for name in FIGURES:
        refuse_links(folder / name, folder)
        save(race_figure(race, task.unit), folder / name)
    return race, task.unit


def _prepare(options: RaceOptions, say: Callable[[str], None]) -> tuple[str, Stream]:
    """The kind of the data, and its prepared form."""
    path = options.data
    if (path / "meta.json").is_file():
        meta = open_store(path).meta
        kind = "text" if meta.text else "images" if meta.picture else "tokens"
    else:
        if not path.exists():
            raise MemtrainError(f"data={path}: no such file or folder; name your text or images")
        if is_run(path):
            raise MemtrainError(f"{path}: is a run; memtrain race takes data, such as book.txt")
        kind = require_kind(path, "").recipes[0]
    default = recipe(kind, options.size).data
    assert isinstance(default, Stream)
    return kind, prepared_stream(kind, path, default, options.option, report=say)


def _held_out_counts(task: StreamTask, device: torch.device) -> dict[str, int]:
    """How many held-out sequences choose rates, and how many give the result."""
    there = task.held_out_sequences
    if there < LEAST:
        raise _too_little_held_out(task.config, there)
    most = 64 if device.type == "cuda" else 16
    validation = min(2 * most, max(2, there // 5))
    return {
        "validation": validation,
        "groups": GROUPS,
        "group": min(most, (there - validation) // GROUPS),
    }


def _too_little_held_out(stream: Stream, there: int) -> MemtrainError:
    return MemtrainError(
        f"{stream.path}: holds out {there} sequences of {stream.evaluate_length} tokens, a race "
        f"needs {LEAST}; race with more data, or hold out more: --option held_out 0.3"
    )


def _held_out(task: StreamTask, plan: RacePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences that choose, and those of the result, (N, T + 1) with their first tokens."""
    count = plan.validation + plan.groups * plan.group
    batch = task.held_out(count, torch.Generator().manual_seed(EVALUATION_SEED))
    whole = torch.cat([batch.inputs[:, :1], batch.targets], dim=1)
    return whole[: plan.validation], whole[plan.validation :]


def score_counts(task: StreamTask, plan: RacePlan) -> dict[str, Any]:
    """The best n-gram model of evaluation/ngram.py on the targets of the result."""
    _, sequences = _held_out(task, plan)
    targets = sequences.clone()
    targets[:, 0] = IGNORE_INDEX
    models = count_baselines(task.corpus(), sequences, targets, COUNTED["cpu"])
    best = min(models, key=lambda one: one.nats)
    every = {one.name: one.nats for one in models}
    return {"title": best.name, "nats": best.nats, "models": every}


def score_ppmd(task: StreamTask, plan: RacePlan) -> dict[str, Any]:
    """PPMd at the order that is best on the other sequences."""
    if task.vocab_size > SYMBOLS:
        return {"title": "PPMd", "problem": f"reads bytes, and there are {task.vocab_size} tokens"}
    if reason := ppmd_missing():
        return {"title": "PPMd", "problem": f"left out, {reason}"}
    train = task.tokens("train").cpu().numpy().tobytes()
    choosing, sequences = ([bytes(row) for row in part.tolist()] for part in _held_out(task, plan))
    tried = {order: sum(ppmd_losses(train, choosing, order)) for order in ORDERS}
    order = min(tried, key=tried.__getitem__)
    losses = torch.tensor(ppmd_losses(train, sequences, order), dtype=torch.float64)
    groups = losses.view(plan.groups, -1).mean(dim=1).tolist()
    title = f"PPMd, order {order}"
    return {"title": title, "nats": float(losses.mean()), "groups": groups, "memory": MEMORY}
