"""What one of two processes does: `python two_processes.py FOLDER JOB...`, started by the tests."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from conftest import TINY
from memtrain.config import EngineConfig, LogConfig, PretrainConfig, RunConfig
from memtrain.errors import EndStage, MemtrainError
from memtrain.objectives.large_vocabulary import LOGITS_AT_ONCE
from memtrain.runs import heartbeat
from memtrain.runs.distributed import Group, join
from memtrain.runs.processes import Interrupted, end_if_one_of_several
from memtrain.training import loop as stage
from memtrain.training.callbacks import Callback, Metrics
from memtrain.training.console import Reporter
from memtrain.training.loop import StageLoop
from memtrain.training.run import Run

STEPS = 50
SHARED = replace(
    TINY,
    # Fewer samples than memory tokens: all processes must choose the same ones.
    smt=replace(
        TINY.smt,
        steps=STEPS,
        batch_size=8,
        learning_rate=1e-3,
        uniformity_samples=64,
        token_weight=0.5,
    ),
    dmt=replace(TINY.dmt, steps=STEPS, batch_size=8, empty_start=0.3, label_stride=2),
    bptt=replace(TINY.bptt, steps=STEPS, batch_size=8),
    engine=EngineConfig(device="cpu", threads=1),
    log=LogConfig(every=1, evaluate_every=0, evaluate_sequences=8, checkpoint_every=15),
)
"""All three stages, every number of every step written down."""
PAPER = replace(
    SHARED,
    smt=replace(SHARED.smt, token_weight=0.0),
    teacher=replace(SHARED.teacher, encoder="bidirectional"),
    engine=EngineConfig(device="cpu", threads=1, shard_teacher=True),
)
"""The paper's encoder, spread over the processes block by block."""
CAUSAL = replace(
    SHARED,
    smt=replace(SHARED.smt, steps=10),
    dmt=replace(SHARED.dmt, steps=5),
    bptt=replace(SHARED.bptt, steps=0),
    engine=EngineConfig(device="cpu", threads=1, shard_teacher=True),
)
"""The causal encoder, spread as one."""
TWO_STAGES = replace(
    PAPER,
    pretrain=PretrainConfig(steps=6, batch_size=8),
    smt=replace(PAPER.smt, steps=6, train_teacher=False),
    dmt=replace(PAPER.dmt, steps=6, train_teacher=True, uniformity_samples=16),
    bptt=replace(PAPER.bptt, steps=0),
)
"""The teacher alone, then the cell alone, then both."""
SHORT = replace(
    PAPER,
    smt=replace(PAPER.smt, steps=20),
    dmt=replace(PAPER.dmt, steps=5),
    bptt=replace(PAPER.bptt, steps=0),
)


MUON = replace(
    SHARED,
    smt=replace(SHARED.smt, steps=10, optimizer="muon"),
    dmt=replace(SHARED.dmt, steps=0),
    bptt=replace(SHARED.bptt, steps=0),
)


class At(Reporter):
    """Does something when a stage reaches a step."""

    def __init__(self, stage: str, step: int, act: Callable[[], None]) -> None:
        self.wanted, self.name, self.act = (stage, step), "", act

    def stage(self, name: str, step: int, steps: int) -> None:
        self.name = name

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if (self.name, step) == self.wanted:
            self.act()


def stop_alone(config: RunConfig, folder: Path, stage: str, step: int) -> None:
    """Train in this process alone, up to a step."""
    try:
        Run.create(config, folder).train(
            At(stage, step, lambda: signal.raise_signal(signal.SIGTERM))
        )
    except Interrupted:
        return
    raise AssertionError("it was not stopped")


@contextmanager
def exchanging_after_every_step() -> Iterator[None]:
    """The processes agree on a stop at the next step, not only once per second."""
    before, stage.EXCHANGE = stage.EXCHANGE, 0.0
    try:
        yield
    finally:
        stage.EXCHANGE = before


def train(group: Group, folder: Path) -> None:
    """Both ways of sharing the work, then a run that is stopped: one process gets the signal."""
    Run.create(SHARED, folder / "shared", group=group).train()
    Run.create(PAPER, folder / "spread", group=group).train()
    Run.create(CAUSAL, folder / "spread causal", group=group).train()
    Run.create(TWO_STAGES, folder / "spread stages", group=group).train()
    whole = LOGITS_AT_ONCE["cpu"]
    LOGITS_AT_ONCE["cpu"] = 20  # as with a large vocabulary
    Run.create(CAUSAL, folder / "spread chunks", group=group).train()
    LOGITS_AT_ONCE["cpu"] = whole
    run = Run.create(SHORT, folder / "stopped", group=group)
    stop_at_step_12(run)


def stop_at_step_12(run: Run) -> None:
    """Train until one process gets the signal."""
    try:
        with exchanging_after_every_step():
            run.train(At("smt", 12, lambda: signal.raise_signal(signal.SIGTERM)))
    except Interrupted as interrupted:
        assert interrupted.signal_number == signal.SIGTERM
        return
    raise AssertionError("it was not stopped")


def stop_at_save(group: Group, folder: Path) -> None:
    """Stopped at a step that was saved already: all have to know that it was."""
    config = replace(SHORT, log=replace(SHORT.log, checkpoint_every=12))
    stop_at_step_12(Run.create(config, folder / "stopped at save", group=group))


def limited(group: Group, folder: Path) -> None:
    """The processes' clocks disagree by far: the first one's ends the stage for both."""
    seconds = 0.3 if group.main else 1000.0
    smt = replace(SHORT.smt, steps=10**6, seconds=seconds)
    run = Run.create(replace(SHORT, smt=smt), folder / "limited", group=group).train()
    assert run.finished, "it went on"


class EndsThenFails(Callback):
    """Ends SMT at step 6, one step before it is evaluated, and fails in DMT."""

    def __init__(self, main: bool) -> None:
        self.main = main

    def on_step(self, metrics: Metrics) -> None:
        assert self.main, "called in another process"
        if (metrics.stage, metrics.step) == ("smt", 6):
            raise EndStage("enough")
        if (metrics.stage, metrics.step) == ("dmt", 3):
            raise MemtrainError("out of quota")


def callbacks(group: Group, folder: Path) -> None:
    """What a callback of the main process asks for is done by both, with Muon as the optimizer."""
    config = replace(MUON, dmt=replace(SHORT.dmt, steps=5))
    run = Run.create(config, folder / "callbacks", group=group)
    try:
        run.train(callbacks=[EndsThenFails(group.main)])
    except MemtrainError as error:
        steps = [stage.steps for stage in run.progress.stages]
        print(f"rank {group.rank}: {steps} {error}", flush=True)
        return
    raise AssertionError("it was not stopped")


def resume(group: Group, folder: Path) -> None:
    """Go on, on two, with what one process began."""
    Run.open(folder / "alone", group=group).train()


def die(group: Group, folder: Path) -> None:
    """The second process is killed in the middle of the second stage."""
    lose(1, group, folder / "dead 1")


def die_first(group: Group, folder: Path) -> None:
    """The first process, which writes, is killed there."""
    lose(0, group, folder / "dead 0")


def freeze(group: Group, folder: Path) -> None:
    """The second process is stopped there, as by Ctrl-Z, and does not go on."""
    heartbeat.FROZEN = 8.0
    lose(1, group, folder / "frozen 1", signal.SIGSTOP)


def freeze_first(group: Group, folder: Path) -> None:
    """The first process, which keeps the store, is stopped there."""
    heartbeat.FROZEN = 8.0
    lose(0, group, folder / "frozen 0", signal.SIGSTOP)


def lose(rank: int, group: Group, folder: Path, how: int = signal.SIGKILL) -> None:
    run = Run.create(SHARED, folder, group=group)
    if group.rank != rank:
        try:
            run.train()
        except MemtrainError as error:
            print(error, flush=True)  # os._exit does not
            os._exit(2)
    original = StageLoop.after_step

    def after_step(self: StageLoop, metrics: Mapping[str, Tensor]) -> None:
        original(self, metrics)
        if (self.name, self.trainer.step) == ("dmt", 20):
            self.writer.wait()
            os.kill(os.getpid(), how)

    StageLoop.after_step = after_step
    run.train()


JOBS = {
    "train": train,
    "stop at save": stop_at_save,
    "limited": limited,
    "callbacks": callbacks,
    "resume": resume,
    "die": die,
    "die first": die_first,
    "freeze": freeze,
    "freeze first": freeze_first,
}


if __name__ == "__main__":
    processes = join()
    for job in sys.argv[2:]:
        JOBS[job](processes, Path(sys.argv[1]))
    processes.leave()
    end_if_one_of_several(0)
