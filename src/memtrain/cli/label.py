"""memtrain label."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from memtrain.cli.args import command_name, parse
from memtrain.errors import MemtrainError


@dataclass(frozen=True)
class _LabelOptions:
    """Write the memories that the teacher of a run makes of sequences, one per step, to a
    safetensors file, from which `memtrain train labels --data FILE` trains a cell without the
    teacher."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    data: tyro.conf.Positional[Path | None] = None
    """Other data than the run's: what its recipe takes as --data; for a run of a task a .npy of
    tokens of shape (N, T), without targets."""
    out: Path | None = None
    """The file to write (default: RUN/labels.safetensors)."""
    sequences: int = 4096
    """Training sequences, sampled as in training."""
    held_out: int = 256
    """Sequences for evaluation, from held-out data; at most as many as there are."""
    length: int | None = None
    """Tokens per sequence of a stream (default: data.evaluate_length)."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """How memories are stored."""
    seed: int = 0
    """Selects the training sequences."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    overwrite: bool = False
    """Replace the file if it is there."""
    allow_code: bool = False
    """Import your own cell or task class that the run's config names."""


def label(arguments: list[str]) -> int:
    """Write a teacher's memories to a file."""
    arguments = ["--out" if one == "-o" else one for one in arguments]
    options = parse(_LabelOptions, arguments, "memtrain label")
    path = options.out or options.run / "labels.safetensors"
    if path.is_dir():
        raise MemtrainError(f"out={path}: is a folder; name a file in it")
    if path.exists() and not options.overwrite:
        raise MemtrainError(f"out={path}: is there already; --overwrite replaces it")

    from memtrain.training.console import make_reporter
    from memtrain.training.label import label_run
    from memtrain.training.run import Run

    run = Run.open(
        options.run, allow_code=options.allow_code, best=options.best, reporter=make_reporter()
    )
    labels = label_run(
        run,
        path,
        data=options.data,
        sequences=options.sequences,
        held_out=options.held_out,
        length=options.length,
        dtype=options.dtype,
        seed=options.seed,
    )
    count, length, tokens, width = labels.shape
    size = path.stat().st_size / 2**20
    print(
        f"{path}: {count:,} sequences of {length}, {labels.card.held_out:,} of them held out, "
        f"memories {tokens} x {width}, {size:,.1f} MiB"
    )
    print(f"train from it  {command_name()} train labels --data {shlex.quote(str(path))}")
    return 0
