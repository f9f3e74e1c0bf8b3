"""Batches that a background thread fetches: the same as those that a step samples itself."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import TINY, seeded
from memtrain.config import EngineConfig, RunConfig, Stream
from memtrain.data.prepare import prepare_tokens
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.runs.processes import Interrupted
from memtrain.shapes import Batch
from memtrain.training.batches import AHEAD, SLOTS, FetchedBatches, SampledBatches, make_batches
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from memtrain.training.step import Trainer

CPU = torch.device("cpu")


class Numbers(Task):
    """Sequences of one random number; says which thread sampled them."""

    vocab_size, sequence_length = 1000, 1

    def __init__(self) -> None:
        self.threads: list[str] = []

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        self.threads.append(threading.current_thread().name)
        tokens = torch.randint(1000, (count, 1), generator=generator)
        return Batch(tokens, tokens + 1)


class Behind(Numbers):
    in_background = True


def steps(batches: SampledBatches, generator: torch.Generator, count: int) -> list[list[int]]:
    """The batches of steps that draw random numbers themselves, too."""
    seen = []
    for _ in range(count):
        batches.load()
        seen.append(batches.batch().inputs[:, 0].tolist())
        torch.rand(5, generator=generator)
        batches.prefetch()
    return seen


def test_fetched_batches_equal_sampled_ones():
    one, other = seeded(3), seeded(3)
    sampled = steps(SampledBatches(Numbers(), 4, one), one, 9)
    task = Behind()
    fetched = steps(FetchedBatches(task, 4, other, CPU), other, 9)
    assert fetched == sampled and len({tuple(batch) for batch in sampled}) == 9
    assert all(name.startswith("memtrain-batches") for name in task.threads)


def test_the_generator_is_that_of_the_batch_about_to_be_trained():
    """So a checkpoint after a step holds no batch that was fetched ahead."""
    generator, reference = seeded(3), seeded(3)
    batches = FetchedBatches(Behind(), 4, generator, CPU)
    steps(batches, generator, 5)
    sampled = SampledBatches(Numbers(), 4, reference)
    steps(sampled, reference, 5)
    assert torch.equal(generator.get_state(), reference.get_state())


def test_a_state_that_is_set_discards_the_batch_that_was_fetched():
    generator, reference = seeded(3), seeded(8)
    batches = FetchedBatches(Behind(), 4, generator, CPU)
    steps(batches, generator, 2)
    generator.set_state(seeded(8).get_state())
    assert steps(batches, generator, 3) == steps(
        SampledBatches(Numbers(), 4, reference), reference, 3
    )


def test_every_batch_is_in_the_same_tensors():
    """A CUDA graph reads them where they were when it was captured."""
    generator = seeded()
    batches = FetchedBatches(Behind(), 4, generator, CPU)
    places, values = set(), set()
    for _ in range(2 * SLOTS + 1):
        batches.load()
        batch = batches.batch()
        places.add((batch.inputs.data_ptr(), batch.targets.data_ptr()))
        values.add(tuple(batch.inputs[:, 0].tolist()))
        assert torch.equal(batch.targets, batch.inputs + 1)
        batches.prefetch()
    assert len(places) == 1 and len(values) == 2 * SLOTS + 1


def test_only_tasks_that_ask_for_it_are_sampled_in_the_background():
    assert type(make_batches(Numbers(), 4, seeded(), CPU)) is SampledBatches
    assert type(make_batches(Behind(), 4, seeded(), CPU)) is FetchedBatches


def test_an_error_of_the_thread_is_raised_by_the_step_that_needs_the_batch():
    class Failing(Behind):
        def sample(self, count: int, generator: torch.Generator) -> Batch:
            if len(self.threads) == 2:
                raise MemtrainError("train.bin: changed")
            return super().sample(count, generator)

    generator = seeded()
    batches = FetchedBatches(Failing(), 4, generator, CPU)
    assert len(steps(batches, generator, 2)) == 2
    with pytest.raises(MemtrainError, match="changed"):
        batches.load()


# ------------------------------------------------------------------- several batches ahead


class CountingGenerator(torch.Generator):
    """Has the state of a GPU's generator: a seed and a counter, 8 bytes each."""

    def __new__(cls, device: object = None, seed: int = 7) -> "CountingGenerator":
        return super().__new__(cls)

    def __init__(self, device: object = None, seed: int = 7) -> None:
        self.state = torch.tensor([seed, 0])

    def get_state(self) -> Tensor:
        return self.state.clone().view(torch.uint8)

    def set_state(self, state: Tensor) -> Any:
        self.state = state.clone().view(torch.int64)

    def draw(self, numbers: int) -> Tensor:
        seed, count = self.state.tolist()
        self.state[1] += numbers
        return torch.from_numpy(np.random.default_rng([seed, count]).random(numbers))


class Counted(Behind):
    """Sequences of a number of the counting generator; knows how many were sampled."""

    def sample(self, count: int, generator: Any) -> Batch:
        self.threads.append(threading.current_thread().name)
        tokens = (1000 * generator.draw(count)).long()[:, None]
        return Batch(tokens, tokens + 1)


@pytest.fixture
def counting(monkeypatch) -> CountingGenerator:
    monkeypatch.setattr(torch, "Generator", CountingGenerator)
    return CountingGenerator()


def counted_steps(batches: SampledBatches, generator, draws: list[int]) -> list[list[int]]:
    """The batches of steps; each draws its number of `draws` itself, too."""
    seen = []
    for numbers in draws:
        batches.load()
        seen.append(batches.batch().inputs[:, 0].tolist())
        generator.draw(numbers)
        batches.prefetch()
    return seen


DRAWS = [8, 8, 8, 8, 8, 8, 24, 8, 8, 8, 8, 4, 4, 4, 4, 4]


def test_batches_of_states_that_are_known_ahead_equal_sampled_ones(counting: CountingGenerator):
    """Also where a step draws more or fewer numbers than those before it."""
    reference = CountingGenerator()
    sampled = counted_steps(SampledBatches(Counted(), 4, reference), reference, DRAWS)
    fetched = counted_steps(FetchedBatches(Counted(), 4, counting, CPU), counting, DRAWS)
    assert fetched == sampled and len({tuple(batch) for batch in sampled}) == len(DRAWS)
    assert torch.equal(counting.state, reference.state)


def test_several_batches_are_fetched_ahead_of_steps_that_draw_as_many_numbers(
    counting: CountingGenerator,
):
    task = Counted()
    batches = FetchedBatches(task, 4, counting, CPU)
    for done, drawn in enumerate([8] * 10, 1):
        counted_steps(batches, counting, [drawn])
        for _, fetched in batches._ahead:
            fetched.result()
        assert len(task.threads) == done + (1 if done < 3 else AHEAD)  # none for nothing


def test_a_state_that_is_set_discards_the_batches_that_were_fetched_ahead(
    counting: CountingGenerator,
):
    batches = FetchedBatches(Counted(), 4, counting, CPU)
    counted_steps(batches, counting, [8] * 5)
    reference = CountingGenerator(seed=9)
    counting.set_state(reference.get_state())
    fetched = counted_steps(batches, counting, [8] * 5)
    sampled = counted_steps(SampledBatches(Counted(), 4, reference), reference, [8] * 5)
    assert fetched == sampled


def test_a_reading_thread_ahead_leaves_a_cpu_generator_alone():
    """Its later states are not known: one batch is fetched ahead."""
    generator, task = seeded(), Behind()
    batches = FetchedBatches(task, 4, generator, CPU)
    steps(batches, generator, 6)
    assert len(batches._ahead) == 1 and batches._ahead[0][1].result()
    assert len(task.threads) == 7


# ---------------------------------------------------------------------------------------- runs


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, 50, (300, 40)).astype(np.uint8)
    np.save(tmp_path / "tokens.npy", tokens)
    return prepare_tokens(tmp_path / "tokens.npy", tmp_path / "store").folder


def run_config(store: Path, resident, **changes) -> RunConfig:
    config = replace(
        TINY,
        data=Stream(path=str(store), evaluate_length=24, resident=resident),
        teacher=replace(TINY.teacher, context_length=8),
        smt=replace(TINY.smt, steps=7, timesteps=2, future_length=5),
        dmt=replace(TINY.dmt, steps=6, rollout_length=7),
        bptt=replace(TINY.bptt, steps=6, sequence_length=9),
    )
    return replace(config, **changes)


def losses(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if "seconds" not in key}
        for line in lines
    ]


def test_a_run_from_disk_equals_one_from_memory_to_the_bit(store: Path, tmp_path: Path):
    runs = {}
    for resident in ("device", "disk"):
        runs[resident] = Run.create(run_config(store, resident), tmp_path / resident).train(
            Reporter()
        )
    assert losses(tmp_path / "disk") == losses(tmp_path / "device")
    one, other = (runs[name].models.state_dict() for name in ("device", "disk"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert runs["disk"].task.in_background and not runs["device"].task.in_background


def test_micro_batches_from_disk_equal_those_from_memory(store: Path, tmp_path: Path):
    for resident in ("device", "disk"):
        config = run_config(store, resident)
        config = replace(
            config,
            smt=replace(config.smt, accumulate=2),
            dmt=replace(config.dmt, steps=0),
            bptt=replace(config.bptt, accumulate=4),
        )
        Run.create(config, tmp_path / resident).train(Reporter())
    assert losses(tmp_path / "disk") == losses(tmp_path / "device")


class StopAt(Reporter):
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("resumed", ["disk", "device"])
def test_a_run_from_disk_resumes_bit_exactly(store: Path, tmp_path: Path, resumed: str):
    """Also where the tokens are in memory from then on."""
    whole = Run.create(run_config(store, "disk"), tmp_path / "whole").train(Reporter())
    run = Run.create(run_config(store, "disk"), tmp_path / "run")
    with pytest.raises(Interrupted):
        run.train(StopAt(4))
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"resident": "disk"', f'"resident": "{resumed}"'))
    again = Run.open(tmp_path / "run").train(Reporter())
    one, other = whole.models.state_dict(), again.models.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


class FakeGraph:
    """Replays a step as a CUDA graph does: on the batch tensors that it saw when captured."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.calls = trainer, 0

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == 3:
            captured = self.trainer.batches.batch()
            self.trainer.batches.batch = lambda: captured  # type: ignore[method-assign]
        return self.trainer.compute()


@pytest.mark.parametrize("stage", ["smt", "bptt"])
def test_a_replayed_step_reads_every_batch_from_the_captured_tensors(store: Path, stage: str):
    metrics: dict[str, list[float]] = {}
    for resident in ("device", "disk"):
        run = Run(run_config(store, resident))
        trainer = Trainer(
            run.objective(stage), run.config.stages()[stage], run.task, run.engine, seed=1
        )
        if resident == "disk":
            trainer.captured, trainer.run_step = True, FakeGraph(trainer)
        with trainer.frozen_rest():
            metrics[resident] = [float(trainer.train_step()["loss"]) for _ in range(8)]
    assert metrics["disk"] == metrics["device"]


def test_a_file_that_changes_stops_the_run_with_one_line(store: Path, tmp_path: Path):
    run = Run.create(run_config(store, "disk"), tmp_path / "run")
    train = store / "train.bin"
    train.write_bytes(train.read_bytes()[:100])
    with pytest.raises(MemtrainError, match=r"train.bin: changed while it was in use; [^\n]*$"):
        run.train(Reporter())


def test_the_start_of_a_run_says_where_its_tokens_are(store: Path, tmp_path: Path):
    said: list[str] = []

    class Noted(Reporter):
        def say(self, message: str) -> None:
            said.append(message)

    for resident in ("auto", "disk"):
        config = run_config(store, resident, dmt=replace(TINY.dmt, steps=0))
        Run.create(config, tmp_path / resident).train(Noted(), until="smt")
    assert said == [
        "data: 11.7 KiB of tokens, in memory (data.resident=auto)",
        "data: 11.7 KiB of tokens, read from disk in the background (data.resident=disk)",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["smt", "dmt", "bptt"])
def test_captured_steps_from_disk_equal_those_from_the_gpu(store: Path, stage: str):
    """Tokens on the GPU are sampled inside the graph, those on disk copied in before each replay:
    both take the same numbers from the GPU's generator."""
    metrics, states = {}, {}
    for resident in ("device", "disk"):
        run = Run(run_config(store, resident, engine=EngineConfig(device="cuda")))
        config = run.config.stages()[stage]
        trainer = Trainer(run.objective(stage), config, run.task, run.engine, seed=1)
        assert trainer.captured and run.task.in_background == (resident == "disk")
        with trainer.frozen_rest():
            metrics[resident] = [float(trainer.train_step()["loss"]) for _ in range(20)]
        states[resident] = trainer.generator.get_state()
    assert metrics["disk"] == metrics["device"]
    assert torch.equal(states["disk"], states["device"])
