import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from memtrain.bench import measure as measuring
from memtrain.bench.cases import SUITES, Noise, cases
from memtrain.bench.measure import CaseResult, _continues, differs, matrix_peak, measure
from memtrain.bench.report import print_results
from memtrain.cli import main
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError
from memtrain.recipes.sizes import size_named

CPU = EngineConfig(device="cpu")


@cache
def measured(suite: str) -> list[CaseResult]:
    return [measure(case, CPU, seconds=1e-3) for case in cases(suite, "tiny")]


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_is_timed_and_its_operations_counted(suite: str):
    for case, result in zip(cases(suite, "tiny"), measured(suite), strict=True):
        assert 0 < result.fast.seconds < 60
        assert result.fast.start_up > result.fast.seconds
        assert result.flops is not None and result.flops > 0
        assert math.isclose(result.tokens_per_second * result.fast.seconds, case.tokens)


def test_flops_of_generation_count_its_matrix_products():
    flops = measured("generate")[0].flops
    width, inner, hidden = 32, 32, 128

    def block(rows: int, kept: int) -> int:
        """Operations of one block: queries, keys and values, attention, what follows it."""
        attention = 2 * 2 * kept * rows * inner
        project = 2 * width * inner * (kept + 2 * rows) + 2 * inner * width * kept
        return attention + project + 2 * 2 * kept * width * hidden

    cell = block(5, 5) + block(5, 4)  # 4 memory tokens and the one that is read
    readout = block(4, 1) + 2 * width * 256
    assert flops == cell + readout


@pytest.mark.parametrize("suite", ["dmt", "bptt"])
def test_operations_of_rollouts_grow_with_the_batch(suite: str, monkeypatch: pytest.MonkeyPatch):
    case = cases(suite, "tiny")[0]
    scaled = measured(suite)[0].flops
    monkeypatch.setattr(measuring, "COUNTED", 10**6)
    assert scaled == measure(case, CPU, seconds=1e-3, reference=False).flops


def test_cases_out_of_memory_are_left_out_and_reported(monkeypatch: pytest.MonkeyPatch, capsys):
    real, timed = measuring.time_case, []

    def time_case(case, engine, seconds):
        timed.append((case.label, engine.fast))
        if case.label == "SMT step" and not engine.fast:
            raise torch.OutOfMemoryError
        if "all labels" in case.label:
            raise torch.OutOfMemoryError
        return real(case, engine, seconds)

    monkeypatch.setattr(measuring, "time_case", time_case)
    result = measure(cases("smt", "tiny")[0], CPU, seconds=1e-3)
    assert result.reference is None and result.ratio is None
    assert main(["bench", "dmt", "--device", "cpu", "--seconds", "0.001", "--json"]) == 0
    out, err = capsys.readouterr()
    (left,) = json.loads(out.strip().splitlines()[-1])["results"]
    assert left["label"] == "DMT step, 1 label in 16"
    assert "2/2  DMT step, all labels, batch 4\n  left out: not enough memory" in err


def test_identical_reference_is_not_timed_again():
    plain = replace(CPU, fast=False)
    assert differs(CPU) and not differs(plain)
    case = cases("smt", "tiny")[0]
    assert measure(case, plain, seconds=1e-3).reference is None
    both = measured("smt")[0]
    assert both.reference is not None and both.ratio == both.reference.seconds / both.fast.seconds


def test_untrained_parameters_are_frozen_while_a_step_is_timed(monkeypatch):
    seen, real = [], measuring.Trainer.train_step

    def train_step(trainer):
        seen.append([p.requires_grad for p in trainer.objective.teacher.parameters()])
        return real(trainer)

    monkeypatch.setattr(measuring.Trainer, "train_step", train_step)
    measuring.time_case(cases("dmt", "tiny")[0], CPU, seconds=1e-3)
    assert seen and not any(any(flags) for flags in seen)


def test_slow_steps_are_repeated_less_often():
    assert _continues([], 1.0) and _continues([0.1, 0.1], 1.0) and _continues([0.1] * 3, 1.0)
    assert not _continues([4.0], 1.0) and not _continues([0.4] * 3, 1.0)


def test_the_papers_cases_have_the_papers_size():
    (smt,) = cases("smt", "paper")
    assert (smt.batch, smt.tokens) == (128, 128 * 320)
    assert [c.config.dmt.label_stride for c in cases("dmt", "paper")] == [16, 1]
    assert [c.batch for c in cases("generate", "paper")] == [1, 128, 2048]
    assert [c.config.bptt.recompute for c in cases("bptt", "paper")] == [0, 16]


def test_medium_cases_have_the_models_of_the_recipes_of_that_size():
    (smt,) = cases("smt", "medium")
    size = size_named("medium")
    assert (smt.config.teacher, smt.config.cell) == (size.teacher, size.cell)
    assert (smt.batch, cases("bptt", "medium")[0].tokens) == (size.batch_size, 128 * 256)


def test_growth_of_size_medium_is_refused_in_words(capsys):
    assert main(["bench", "growth", "--size", "medium"]) == 2
    assert "growth has paper and tiny" in capsys.readouterr().err


def test_an_unknown_suite_is_named():
    with pytest.raises(MemtrainError, match="smt, dmt, generate, bptt"):
        cases("training", "tiny")


def test_random_data_is_drawn_as_windows_of_one_stream():
    task = Noise(tokens=100).windows(20)
    batch = task.sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_matrix_peak_is_a_rate():
    assert matrix_peak(torch.device("cpu"), seconds=1e-3) > 1e8


def test_json_is_one_object_on_the_last_line(capsys):
    assert main(["bench", "generate", "--seconds", "0.001", "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["batch"] for result in record["results"]] == [1, 32]
    assert record["size"] == "tiny" and record["matrix_peak_flops"] > 0


def test_a_table_shows_every_case(capsys):
    assert main(["bench", "smt", "--seconds", "0.001", "--device", "cpu"]) == 0
    assert "SMT step" in capsys.readouterr().out


def test_zero_seconds_is_refused(capsys):
    assert main(["bench", "--seconds", "0"]) == 2
    assert "seconds=0.0: must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peak", "expected"), [(2e14, ("0.00628", "200 TFLOP/s")), (5e10, ("6.28", "50 GFLOP/s"))]
)
def test_rates_use_a_unit_that_suits_the_machine(capsys, peak: float, expected: tuple):
    timing = measuring.Timing(seconds=1.0, start_up=1.0, peak_bytes=None)
    result = CaseResult(
        suite="smt",
        label="SMT step",
        batch=4,
        tokens_per_second=9.0,
        flops=6_280_000_000,
        fast=timing,
        reference=None,
    )
    print_results([result], peak, torch.device("cpu"))
    out = capsys.readouterr().out
    assert all(words in out for words in expected)
    assert out.count("FLOP/s") == 2  # of the machine, and one column
    threads = torch.get_num_threads()
    assert f"{threads} thread{'s' * (threads > 1)}, " in out
