"""Measure the teacher's held-out loss at given steps of SMT, to compare implementations.

    python scripts/teacher_marks.py mnist --data data/mnist --at 500 1000 1500 2000 --out marks.json

Trains SMT and evaluates at each mark on windows at random positions of the held-out stream, each
with a full context: the mean loss over the whole future, and of the next target only, which varies
much more between windows, so many are needed. Its standard error is printed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from memtrain.config import RunConfig, Stream
from memtrain.data.store_reader import open_store
from memtrain.objectives.futures import gather_window
from memtrain.recipes import recipe
from memtrain.shapes import Batch
from memtrain.training.run import Run
from memtrain.training.step import Trainer

BATCH = 1024
"""Windows per batch."""


def held_out_windows(config: RunConfig, count: int) -> Iterator[Batch]:
    """Windows of context and future at fixed random positions."""
    assert isinstance(config.data, Stream)
    tokens = torch.from_numpy(np.array(open_store(Path(config.data.path)).tokens("test")))
    length = config.teacher.context_length + config.smt.future_length
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(tokens) - length, (count,), generator=generator)
    for some in starts.split(BATCH):
        window = tokens[some[:, None] + torch.arange(length + 1)].long()
        yield Batch(window[:, :-1], window[:, 1:])


@torch.no_grad()
def held_out_losses(run: Run, windows: int) -> dict[str, float]:
    """The teacher's losses on held-out windows."""
    assert run.teacher is not None
    last, future = run.config.teacher.context_length - 1, run.config.smt.future_length
    losses = []
    with run.engine.eval_mode():
        for batch in held_out_windows(run.config, windows):
            batch = batch.to(run.engine.device)
            steps = torch.full((len(batch.inputs), 1), last, device=run.engine.device)
            window = gather_window(batch, steps, future)
            memory = run.teacher.encode(batch.inputs, steps)[:, 0]
            logits = run.teacher.decode(memory, window.future_inputs[:, 0]).float()
            losses.append(
                F.cross_entropy(
                    logits.transpose(1, 2), window.future_targets[:, 0], reduction="none"
                ).double()
            )
    every = torch.cat(losses)
    return {
        "decode": float(every.mean()),
        "next": float(every[:, 0].mean()),
        "next_standard_error": float(every[:, 0].std() / len(every) ** 0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="mnist, tinystories, text, ...")
    parser.add_argument("--data", required=True, help="folder of the prepared data set")
    parser.add_argument("--at", type=int, nargs="+", default=[500, 1000, 1500, 2000])
    parser.add_argument("--size", help="size of the recipe: paper, medium, small, tiny")
    parser.add_argument("--steps", type=int, help="steps of the whole schedule")
    parser.add_argument("--next-weight", type=float, help="smt.next_weight (the recipe's)")
    parser.add_argument("--learning-rate", type=float, help="smt.learning_rate (the recipe's)")
    parser.add_argument("--windows", type=int, default=2**18)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write the marks to this JSON file")
    options = parser.parse_args()
    config = recipe(options.recipe, options.size)
    if not isinstance(config.data, Stream):
        parser.error(f"{options.recipe} has no stream of tokens")
    if options.steps is not None and options.steps < max(options.at):
        parser.error(f"--steps {options.steps}: the last mark is at {max(options.at)}")
    smt = replace(config.smt, steps=options.steps or config.smt.steps)
    for name in ("next_weight", "learning_rate"):
        if getattr(options, name) is not None:
            smt = replace(smt, **{name: getattr(options, name)})
    config = replace(
        config,
        data=replace(config.data, path=options.data),
        smt=smt,
        engine=replace(config.engine, device=options.device),
    )
    run = Run(config, Path("unwritten"))
    trainer = Trainer(run.objective("smt"), config.smt, run.task, run.engine, config.seed)
    marks, began = [], time.perf_counter()
    with trainer.frozen_rest():
        while trainer.step < max(options.at):
            trainer.train_step()
            if trainer.step in options.at:
                trainer.objective.sync_readout()
                found = held_out_losses(run, options.windows)
                seconds = time.perf_counter() - began
                marks.append({"step": trainer.step, "seconds": seconds, **found})
                print(
                    f"step {trainer.step:<6} whole future {found['decode']:.4f}   next "
                    f"{found['next']:.4f} ± {found['next_standard_error']:.4f} nats",
                    flush=True,
                )
    if options.out:
        record = {"recipe": options.recipe, "windows": options.windows, "marks": marks}
        known = {name: getattr(smt, name) for name in ("steps", "learning_rate", "next_weight")}
        options.out.write_text(json.dumps(record | known) + "\n")


if __name__ == "__main__":
    main()
