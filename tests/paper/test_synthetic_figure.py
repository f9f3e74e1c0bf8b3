"""The synthetic figure: its settings, its runs, and a verdict that can say both yes and no."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memtrain.config import Arithmetic, Recall, Retrieval
from memtrain.data.task import build_task
from memtrain.paper import load
from memtrain.paper.base import Job, Result, Setup, Verdict
from memtrain.paper.figures.synthetic import METHODS, VALIDATION_SEED
from memtrain.paper.settings import (
    Setting,
    best_accuracy,
    chance,
    settings_of,
    size_class,
    sweeps_of,
)
from memtrain.training.run import Run

FIGURE = load("synthetic")
GPU = Setup(scale="gpu", folder=Path("nowhere"))
SETTINGS: dict[tuple[Any, Any], Setting] = {(one.task, one.name): one for one in settings_of(GPU)}
OURS, DECODER, BPTT = "SMT → DMT", "SMT → DMT with decoder", "BPTT"


def result_of(job: Job, **measured: float) -> Result:
    return Result(
        figure="synthetic",
        version=FIGURE.version,
        job=job.name,
        key=job.key,
        tags=dict(job.tags),
        measured=measured,
        cost={"steps": 1, "tokens": 1, "sequential_ops": 1, "seconds": 7.25},
        curve=[],
    )


def results_with(
    accuracies: dict[str, float], jobs: list[Job] | None = None, **special: dict[str, float]
) -> list[Result]:
    """Results of all jobs: shares of the way from chance to the best, by method, or by task and
    method; a teacher's share is that of "teacher"."""
    results = []
    for job in FIGURE.grid(GPU) if jobs is None else jobs:
        tags: dict[str, Any] = dict(job.tags)
        given = accuracies | special.get(tags["task"], {})
        data = SETTINGS[tags["task"], tags["setting"]].data
        low, high = chance(data), best_accuracy(data)
        rnn = low + (high - low) * given.get(tags["method"], 0.5)
        teacher = low + (high - low) * given.get("teacher", 1.0)
        scores = {"rnn_accuracy": rnn, "teacher_accuracy": teacher}
        results.append(
            result_of(job, **scores, **{f"validation_{k}": v for k, v in scores.items()})
        )
    return results


def judged(accuracies: dict[str, float], **special: dict[str, float]) -> Verdict:
    return FIGURE.verdict(GPU, results_with(accuracies, None, **special))


# ------------------------------------------------------------------------------------ settings


def test_five_values_per_sweep_and_no_setting_twice():
    for sweeps in sweeps_of(GPU).values():
        assert [len(sweep.settings) for sweep in sweeps] == [5, 5]
    same = [(one.data, one.memory_tokens, one.memory_dim) for one in SETTINGS.values()]
    assert len(set(map(str, same))) == len(same) == 46 + 3
    assert sum(one.needle_anywhere for one in SETTINGS.values()) == 3
    for scale in ("smoke", "cpu", "gpu", "paper"):
        jobs = FIGURE.grid(Setup(scale=scale, folder=Path("nowhere")))
        assert len({job.key for job in jobs}) == len(jobs)


def test_the_needle_is_in_the_first_half_but_for_the_second_curve():
    every = [one.data for one in SETTINGS.values()]
    shares = [data.needle_within for data in every if isinstance(data, Retrieval)]
    assert Counter(shares) == {0.5: 9, 1.0: 3}


def test_models_are_of_the_size_that_the_docs_state():
    for job in FIGURE.grid(GPU):
        config, setting = job.config, SETTINGS[job.tags["task"], job.tags["setting"]]
        layers = (config.teacher.encoder_layers, config.teacher.decoder_layers, config.cell.layers)
        assert layers == (6, 2, 4) and config.teacher.width == config.cell.width == 128
        assert config.teacher.encoder == "causal" and config.teacher.head_dim == 32
        assert config.cell.memory_tokens == (setting.memory_tokens or 8)
        assert config.teacher.context_length >= setting.length <= config.smt.future_length
        assert config.smt.timesteps == 0 and config.smt.decode_timesteps == 64
        steps = config.smt.steps + config.dmt.steps
        assert 2500 <= steps + config.bptt.steps <= 5000


def test_chance_is_what_a_guess_scores():
    random = torch.Generator().manual_seed(0)
    data = Recall(pairs=4, key_symbols=8, value_symbols=8)
    batch = build_task(data).sample(20_000, random)
    guess = batch.inputs[:, 1]  # the first value
    assert float((guess == batch.targets[:, -1]).double().mean()) == pytest.approx(
        chance(data), abs=0.01
    )
    assert chance(Retrieval(vocab_size=9)) == 1 / 8


def test_the_best_accuracy_of_noisy_labels_is_that_of_the_true_ones():
    data = Retrieval(sequence_length=8, noise=0.4)
    batch = build_task(data).sample(20_000, torch.Generator().manual_seed(0))
    marker = (batch.inputs == 0).int().argmax(1, keepdim=True)
    true = batch.inputs.gather(1, marker + 1)[:, 0]
    found = float((true == batch.targets[:, -1]).double().mean())
    assert found == pytest.approx(best_accuracy(data), abs=0.01)


def test_the_best_accuracy_of_arithmetic_leaves_the_first_examples_open():
    assert best_accuracy(Arithmetic(vocab_size=31, difficulty=1, examples=4)) == 1.0  # y = 0
    one = Arithmetic(vocab_size=31, difficulty=31, examples=1)
    assert best_accuracy(one) == chance(one) == pytest.approx(1 / 31, rel=0.05)
    # Two different x determine the rule: the first y is a guess, the second nearly so.
    many = best_accuracy(Arithmetic(vocab_size=31, difficulty=31, examples=10))
    assert many == pytest.approx(0.8, abs=0.02)


# ---------------------------------------------------------------------------------------- runs


def test_dmt_starts_from_smt_and_bptt_has_as_many_steps_as_both():
    jobs: dict[tuple[Any, ...], Job] = {
        tuple(job.tags[name] for name in ("setting", "task", "method", "rate")): job
        for job in FIGURE.grid(GPU)
    }
    for (setting, task, method, rate), job in jobs.items():
        if METHODS[method].dmt is not None:
            before = "SMT with noise" if "noise" in method else "SMT"
            assert job.start == jobs[setting, task, before, rate].config
        if method == BPTT:
            whole = jobs[setting, task, OURS, rate].config
            assert job.config.bptt.steps == whole.smt.steps + whole.dmt.steps
            assert job.config.cell == whole.cell and job.config.bptt.batch_size == 32
    paper, ours = jobs["T=16", "retrieval", OURS, 1e-3], jobs["T=16", "retrieval", DECODER, 1e-3]
    assert not paper.config.dmt.through_time and not paper.config.dmt.decode_weight
    assert ours.config.dmt.through_time and ours.config.dmt.decode_weight == 1


def test_both_sides_have_the_same_three_rates():
    jobs = FIGURE.grid(GPU)
    for method in ("SMT", OURS, DECODER, BPTT):
        tried = {job.tags["rate"] for job in jobs if job.tags["method"] == method}
        assert tried == {1e-4, 3e-4, 1e-3}


def test_runs_come_in_the_order_of_what_they_tell():
    results = results_with({})
    jobs = sorted([*FIGURE.grid(GPU), *FIGURE.follow_up(GPU, results)], key=lambda job: job.rank)

    def part(job: Job) -> tuple[int, int]:
        first = 3e-4 if str(job.tags["method"]).startswith(BPTT) else 1e-3
        claimed = job.tags["method"] in ("SMT", OURS, DECODER, BPTT)
        other = 2 if job.tags["rate"] != first else 0 if claimed else 1
        length = size_class(SETTINGS[job.tags["task"], job.tags["setting"]].length)
        return 3 if job.tags["seed"] else other, length

    assert list(map(part, jobs)) == sorted(map(part, jobs))
    early = [job.tags["task"] for job in jobs[:40]]
    assert set(early) == {"retrieval", "copy", "stack", "recall", "arithmetic"}


def test_seeds_follow_the_rate_chosen_on_the_validation_sequences():
    results = []
    for result in results_with({}):
        other = {"rnn_accuracy": 0.9 if result["rate"] == 1e-3 else 0.1}
        other["validation_rnn_accuracy"] = 1 - other["rnn_accuracy"] - 0.1 * (result["rate"] < 2e-4)
        results.append(replace(result, measured=result.measured | other))
    jobs = [job for job in FIGURE.follow_up(GPU, results) if job.tags["seed"]]
    assert {job.tags["rate"] for job in jobs} == {3e-4}
    assert {job.tags["seed"] for job in jobs} == {1, 2}
    few = [result for result in results if result["rate"] == 1e-3]
    assert not [job for job in FIGURE.follow_up(GPU, few) if job.tags["seed"]]


def test_equal_seconds_are_those_of_smt_and_dmt():
    jobs = [j for j in FIGURE.grid(GPU) if j.tags["method"] == OURS and j.tags["rate"] == 1e-3]
    more = FIGURE.follow_up(GPU, results_with({}, jobs[:1]))
    assert {job.tags["method"] for job in more} == {"BPTT, equal seconds"}
    assert len(more) == 3 and {job.config.bptt.seconds for job in more} == {7.2}
    again = FIGURE.follow_up(GPU, results_with({}, jobs))
    assert {job.key for job in more} <= {job.key for job in again}


def test_rates_are_chosen_on_other_sequences_than_those_reported(tmp_path: Path, monkeypatch):
    from conftest import TINY

    run, seen = Run(TINY, tmp_path), []
    held_out = run.task.held_out
    monkeypatch.setattr(
        run.task, "held_out", lambda count, random: seen.append(held_out(count, random)) or seen[-1]
    )
    found = FIGURE.measure(run)
    reported, validation = seen
    assert not torch.equal(reported.inputs, validation.inputs)
    usual = run.evaluate(4 * TINY.log.evaluate_sequences)
    assert found["rnn_nats"] == usual.rnn.nats
    other = run.evaluate(4 * TINY.log.evaluate_sequences, seed=VALIDATION_SEED)
    assert found["validation_rnn_nats"] == other.rnn.nats != usual.rnn.nats


# ------------------------------------------------------------------------------------- verdict


def test_it_holds_if_one_kind_of_dmt_is_at_or_above_bptt_in_nine_of_ten_settings():
    assert judged({OURS: 0.9, BPTT: 0.5}).holds is True
    assert judged({OURS: 0.9, BPTT: 0.905}).holds is True  # within 0.01
    assert judged({OURS: 0.5, DECODER: 0.9, BPTT: 0.8}).holds is True
    lost = judged({OURS: 0.5, DECODER: 0.5, BPTT: 0.9})
    assert lost.holds is False
    assert len(lost.numbers["equal_steps"][OURS]["lost"]) == 46
    assert lost.numbers["equal_steps"][OURS]["lost"]["retrieval, T=16"] == pytest.approx(-0.35)
    # Copy is 10 of 46 settings.
    some = judged({OURS: 0.9, DECODER: 0.9, BPTT: 0.5}, copy={BPTT: 1.0})
    counts = some.numbers["equal_steps"][OURS]
    assert some.holds is False
    assert (counts["settings"], counts["won"], len(counts["lost"])) == (46, 36, 10)
    assert "copy, T=128 -0.09" in some.sentence


def test_settings_without_a_trained_teacher_do_not_count():
    found = judged({OURS: 0.9, BPTT: 0.5}, copy={"teacher": 0.5, OURS: 0.1, BPTT: 0.9})
    assert found.holds is True
    assert found.numbers["teacher_trained"] == 36
    assert len(found.numbers["teacher_not_trained"]) == 10
    assert "Not trained: copy, T=8 0.56" in found.sentence
    nothing = judged({OURS: 0.9, BPTT: 0.5, "teacher": 0.5})
    assert nothing.holds is None and "20 settings" in nothing.word


def test_a_noisy_teacher_is_trained_at_the_best_possible_accuracy():
    """0.95 of 0.3 with a noise of 0.8; of 0.63 with four examples of arithmetic."""
    assert judged({"teacher": 0.99}).numbers["teacher_trained"] == 46


def test_settings_in_which_both_are_at_chance_do_not_count():
    found = judged({OURS: 0.9, BPTT: 0.5}, retrieval={OURS: 0.02, BPTT: 0.0})
    counts = found.numbers["equal_steps"][OURS]
    assert counts["settings"] == 46 - 9 and len(counts["at_chance"]) == 9
    assert counts["won"] == 37 and "both at chance in 9" in found.sentence
    lost = judged({OURS: 0.9, BPTT: 0.5}, retrieval={OURS: 0.02, BPTT: 0.9})
    assert len(lost.numbers["equal_steps"][OURS]["lost"]) == 9


def test_until_both_sides_have_all_rates_each_is_at_its_default():
    perfect = {"rnn_accuracy": 1.0, "validation_rnn_accuracy": 1.0}
    every = [
        replace(result, measured=result.measured | perfect)
        if (result["method"], result["rate"]) == (BPTT, 1e-4)  # BPTT is best there
        else result
        for result in results_with({OURS: 0.6, BPTT: 0.5})
    ]
    some = [result for result in every if result["method"] == BPTT or result["rate"] == 1e-3]
    numbers = FIGURE.verdict(GPU, some).numbers
    assert numbers["all_rates"] == 0 and numbers["equal_steps"][OURS]["lost"] == {}
    numbers = FIGURE.verdict(GPU, every).numbers
    assert numbers["all_rates"] == 46 and len(numbers["equal_steps"][OURS]["lost"]) == 46


def test_it_is_drawn_with_one_legend_and_hollow_markers_for_untrained_teachers():
    jobs = FIGURE.grid(GPU)
    results = results_with({OURS: 0.9}, jobs, copy={"teacher": 0.3})
    results += results_with({}, FIGURE.follow_up(GPU, results))
    figure = FIGURE.plot(GPU, results)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert {*METHODS, "chance", "teacher", "hollow: teacher not trained"} <= set(labels)
    assert len(labels) == len(set(labels))
    copy = figure.axes[1]
    hollow = [one for one in copy.lines if one.get_markerfacecolor() == "white"]
    assert all(np.size(one.get_xdata()) == 5 for one in hollow) and len(hollow) == len(METHODS) + 1
    stack = figure.axes[2]
    assert not any(
        np.size(o.get_xdata()) for o in stack.lines if o.get_markerfacecolor() == "white"
    )
    partial = [result for result in results if result["setting"] == "T=16"]
    assert FIGURE.plot(GPU, partial).axes and FIGURE.verdict(GPU, partial).holds is None
