"""A race: equal time and parameters, the same targets for all, and a result in words."""

import io
import json
import random
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import mean

import pytest
import torch
from rich.console import Console

from memtrain.config import Stream
from memtrain.data.stream import StreamTask
from memtrain.demo.race import RaceOptions, _held_out, run_race, score_counts, score_ppmd, training
from memtrain.demo.race import plan as plans
from memtrain.demo.race.plan import (
    CONTENDERS,
    FACTORS,
    HEADROOM,
    TRIALS,
    RaceFile,
    RacePlan,
    check_methods,
    fit_parameters,
    open_race,
    remove_race,
)
from memtrain.demo.race.report import (
    entries,
    notes_of_race,
    race_figure,
    race_json,
    race_table,
    ranked_networks,
    verdict_of_race,
)
from memtrain.demo.race.training import Racing
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import evaluate
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import load_rnn
from memtrain.models.build import build_rnn
from memtrain.models.teacher import count_parameters
from memtrain.plotting.comparison import compare_runs
from memtrain.recipes.sizes import SIZES
from memtrain.runs.processes import Interrupted
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from run_testing import StopAt

PLAN = RacePlan(
    store="data/x",
    kind="text",
    identity="1",
    length=64,
    minutes=10.0,
    size="tiny",
    seed=0,
    device="cpu",
    threads=1,
    methods=list(CONTENDERS),
    validation=4,
    groups=8,
    group=2,
)

NO_STARTS = {"smt": 0.0, "dmt": 0.0, "bptt": 0.0}


# ----------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_network_has_the_same_seconds(name: str):
    pace = {"smt": 0.1, "dmt": 0.5, "bptt": 0.3}
    total = 0.0
    for factor in FACTORS[:TRIALS]:
        trial = PLAN.config(name, factor, pace, NO_STARTS, last=False)
        total += sum(stage.seconds for stage in trial.stages().values())
    last = PLAN.config(name, 1.0, pace, NO_STARTS, last=True)
    stages = {key: stage for key, stage in last.stages().items() if stage.steps}
    total += sum(stage.seconds for stage in stages.values())
    assert total == pytest.approx(10 * 60 / len(PLAN.methods))
    for key, stage in stages.items():  # its seconds end a stage, not its steps
        assert stage.steps * pace[key] >= HEADROOM * stage.seconds > 0


def test_the_time_of_smt_and_dmt_is_divided_as_in_the_recipe():
    config = PLAN.config("smt-dmt", 1.0, {"smt": 0.1, "dmt": 0.5}, NO_STARTS, last=True)
    base = PLAN.recipe("smt-dmt")
    expected = (base.smt.steps * 0.1) / (base.dmt.steps * 0.5)
    assert config.smt.seconds / config.dmt.seconds == pytest.approx(expected)


def test_what_first_steps_take_longer_on_a_gpu_comes_on_top():
    pace, starts = {"smt": 0.1, "dmt": 0.5}, {"smt": 2.0, "dmt": 5.0}
    without = PLAN.config("smt-dmt", 1.0, pace, NO_STARTS, last=True)
    found = PLAN.config("smt-dmt", 1.0, pace, starts, last=True)
    assert found.smt.seconds == pytest.approx(without.smt.seconds + 2)
    assert found.dmt.seconds == pytest.approx(without.dmt.seconds + 5)


def test_a_rate_is_a_multiple_of_the_recipes_in_every_stage():
    config = PLAN.config("smt-dmt", 3.0, {"smt": 0.1, "dmt": 0.5}, NO_STARTS, last=False)
    base = PLAN.recipe("smt-dmt")
    assert config.smt.learning_rate == 3 * base.smt.learning_rate
    assert config.dmt.learning_rate == 3 * base.dmt.learning_rate


@pytest.mark.parametrize("size", ("tiny", "small"))
def test_networks_have_equally_many_parameters(size: str):
    plan = replace(PLAN, size=size)
    target = count_parameters(build_rnn(plan.recipe("smt-dmt"), 256))
    for name in CONTENDERS:
        config = fit_parameters(plan.recipe(name), target, 256)
        assert abs(count_parameters(build_rnn(config, 256)) / target - 1) <= 0.1
    assert size in SIZES


def test_a_network_that_cannot_be_made_as_large_is_refused():
    with pytest.raises(MemtrainError, match=r"attention: its parameters .*\(--methods\)"):
        fit_parameters(PLAN.recipe("attention"), 10**6, 256)


def test_methods_are_checked():
    assert check_methods([]) == list(CONTENDERS)
    assert check_methods(["lstm", "smt-dmt"]) == ["smt-dmt", "lstm"]


# --------------------------------------------------------------------------------------- a race


def text(words: int = 9000) -> str:
    source = random.Random(0)
    chosen = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs\n")
    return " ".join(source.choice(chosen) for _ in range(words))


def options(folder: Path, **changes) -> RaceOptions:
    given = RaceOptions(
        data=folder / "words.txt",
        folder=folder / "race",
        minutes=0.02,
        size="tiny",
        methods=("smt-dmt", "attention"),
        option={},
        seed=0,
        device="cpu",
        threads=1,
        overwrite=False,
    )
    return replace(given, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("race")


@pytest.fixture(scope="module")
def race(folder: Path) -> RaceFile:
    """A race that is stopped in its first trial, and continued."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(plans, "CURVE", 2)  # saves time
        Path("words.txt").write_text(text())
        said: list[str] = []
        with pytest.raises(Interrupted):
            run_race(options(folder), lambda: StopsSoon(), said.append)
        assert said[-1].endswith("evaluations come on top") or "first steps" in said[-1]
        stored = json.loads((folder / "race" / "race.json").read_text())
        assert stored["results"].keys() == {"counts", "ppmd"} and not stored["trials"]
        done, unit = run_race(options(folder), Reporter, said.append)
        assert unit == "character"
    return done


class StopsSoon(StopAt):
    """Stops a run at the first step that it reports."""

    def __init__(self) -> None:
        super().__init__("", 0)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        self.wanted = (self.name, step)
        super().advance(step, metrics)


def test_every_network_and_both_other_models_have_a_result(race: RaceFile):
    assert race.results.keys() == {"counts", "ppmd", "smt-dmt", "attention"}
    assert len(race.trials) == 2 * TRIALS
    for key in ("smt-dmt", "attention"):
        result = race.results[key]
        assert result["nats"] == pytest.approx(mean(result["groups"]))
        assert result["milliseconds"] > 0 and len(result["groups"]) == 8
        run = Run.open(race.folder / key)
        assert run.finished
        seconds = [stage.seconds for stage in run.config.stages().values() if stage.steps]
        assert sum(seconds) == pytest.approx(race.plan.last)
        assert run.totals()["total_seconds"] >= 0.9 * sum(seconds)
        assert run.config.stages()[run.stages[0]].learning_rate == result["rates"][0]


def test_first_steps_are_measured_after_all_is_compiled(race: RaceFile, folder: Path, monkeypatch):
    taken: list[list[float]] = []

    def seconds(run: Run, stage: str, steps: int) -> list[float]:
        first = [9.0, 9.0, 9.0, 9.0, 1.0] if not taken else [2.0, 2.0, 2.0, 4.0, 1.0]
        taken.append([*first, 1.0, 1.5, 1.0, 1.0, 1.0][:steps])
        return taken[-1]

    monkeypatch.setattr(training, "compiles", lambda run: True)
    monkeypatch.setattr(Racing, "_seconds_of_steps", staticmethod(seconds))
    monkeypatch.chdir(folder)
    file = RaceFile(folder / "other", race.plan)
    racing = Racing(file, 128, Reporter, print)
    racing.target = count_parameters(build_rnn(file.plan.recipe("gru"), 128))
    racing._rehearse("gru")
    assert [len(one) for one in taken] == [5, 10]
    assert (file.pace["gru"], file.starts["gru"]) == ({"bptt": 1.0}, {"bptt": 6.0})


def test_the_rate_with_the_lowest_loss_is_taken(race: RaceFile):
    for key in ("smt-dmt", "attention"):
        names = {f"{key}-{factor:.3g}": factor for factor in FACTORS}
        losses = {names[name]: loss for name, loss in race.trials.items() if name in names}
        assert len(losses) == TRIALS
        assert race.results[key]["factor"] == min(losses, key=lambda one: losses[one] or 1e9)


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({1 / 3: 2.0, 1.0: 1.9, 3.0: 1.95}, [1.0, 3.0, 1 / 3]),
        ({1.0: 1.9, 3.0: 1.8, 9.0: 1.7}, [1.0, 3.0, 9.0]),
        ({1 / 3: 2.0, 1.0: None, 3.0: None}, [1.0, 3.0, 1 / 3]),
        ({1.0: None, 3.0: 1.8, 9.0: None}, [1.0, 3.0, 9.0]),
    ],
)
def test_the_third_rate_lies_beyond_the_better_of_two(losses, tried, monkeypatch, tmp_path):
    asked: list[tuple[float, int]] = []

    def trial(self: Racing, name: str, factor: float, left: int) -> float | None:
        asked.append((factor, left))
        return losses[factor]

    monkeypatch.setattr(Racing, "_trial", trial)
    found = Racing(RaceFile(tmp_path, PLAN), 128, Reporter, print)._try_rates("gru")
    assert asked == list(zip(tried, (2, 1, 0), strict=True))
    assert found == {factor: inf if losses[factor] is None else losses[factor] for factor in tried}


def test_the_result_is_of_other_sequences_than_those_that_choose(race, folder, monkeypatch):
    monkeypatch.chdir(folder)
    task = StreamTask.from_config(Stream(path=race.plan.store, evaluate_length=race.plan.length))
    choosing, testing = _held_out(task, race.plan)
    assert len(choosing) == race.plan.validation
    assert len(testing) == race.plan.groups * race.plan.group
    both = torch.cat([choosing, testing])
    assert len(both.unique(dim=0)) == len(both)


def test_all_models_are_scored_on_the_same_targets(race: RaceFile):
    run, plan = Run.open(race.folder / "attention"), race.plan
    _, testing = _held_out(run.task, plan)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = run.rnn.eval()(testing[:, :-1])
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), testing[:, 1:].flatten())
    assert race.results["attention"]["nats"] == pytest.approx(float(nats), rel=1e-4)
    count = plan.groups * plan.group
    counted = evaluate(
        run.task, run.rnn, sequences=count, skip=plan.validation, baselines=True
    ).baselines
    assert race.results["counts"]["models"] == {one.name: one.nats for one in counted}
    # Eight words of equal probability: no model can do better than log 8 per word.
    assert isinstance(run.task, StreamTask)
    least = 3 * text().count(" ") / len(text())
    for key in ("ppmd", "counts"):
        assert race.results[key]["nats"] / 0.6931 > 0.9 * least
    assert race.results["ppmd"]["nats"] / 0.6931 < 1.2 * least


def test_a_finished_race_is_not_trained_again(race: RaceFile, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Run, "train", None)
    again, _ = run_race(options(folder), Reporter, lambda line: None)
    assert again.results == race.results


def test_runs_can_be_compared_and_sampled(race: RaceFile, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    names = [race.folder / key for key in ("smt-dmt", "attention")]
    assert not compare_runs(names).warnings
    assert len(generate(load_rnn(names[1]), length=20).texts()[0]) >= 20


def test_the_table_fits_80_columns_and_the_figure_has_all_curves(race: RaceFile):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(race_table(race, "character"))
    shown = console.export_text()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    labels = [line.get_label() for line in race_figure(race, "character").axes[0].lines]
    titles = {one.title for one in entries(race)}
    assert titles <= set(labels) and "SMT -> DMT, teacher" in labels
    for name in ("race.png", "race.svg"):
        assert (race.folder / name).stat().st_size > 1000


def test_another_plan_in_the_same_folder_is_refused(race: RaceFile, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(MemtrainError, match="holds a race with minutes=0.02, not 7.0; continue it"):
        run_race(options(folder, minutes=7.0), Reporter, lambda line: None)


def test_overwriting_removes_the_race_and_nothing_else(tmp_path: Path):
    (tmp_path / "gru").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    remove_race(tmp_path)  # no race is there
    assert (tmp_path / "gru").exists()
    (tmp_path / "race.json").write_text("{}")
    remove_race(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(MemtrainError, match="holds files that are not a race"):
        open_race(tmp_path, PLAN)


def test_tokens_that_are_no_bytes_leave_ppmd_out():
    task = type("Task", (), {"vocab_size": 300})()
    assert "reads bytes" in score_ppmd.__wrapped__(task, PLAN)["problem"]
    assert callable(score_counts)


# ------------------------------------------------------------------------------------- in words


def finished(**bits: float) -> RaceFile:
    """Results with these bits; every group is that number, with a small common difference."""
    results = {}
    for at, (key, one) in enumerate(bits.items(), start=1):
        key = key.replace("_", "-")
        groups = [(one + 0.01 * ((index * at) % 3 - 1)) * 0.693147 for index in range(8)]
        result = {"nats": one * 0.693147, "groups": groups, "title": key, "factor": 1.0}
        if key in CONTENDERS:
            result |= {"milliseconds": float(at), "rates": [1e-3], "parameters": 5}
        results[key] = result
    return RaceFile(Path("race"), PLAN, results=results)


def test_a_clear_lead_is_named_with_its_size():
    words = verdict_of_race(finished(gru=2.0, lstm=2.5), "byte")
    assert words.startswith("For this data take BPTT, GRU: 2.000 bits per byte on held-out data, ")
    assert "0.500 ± 0.00" in words and "(20%) less than the next network, BPTT, LSTM" in words
    assert words.endswith("a generated token takes 1.00 ms.")


def test_of_networks_within_the_noise_the_faster_is_taken():
    race = finished(gru=2.001, attention=2.0, lstm=3.0)
    words = verdict_of_race(race, "byte")
    assert words.startswith("For this data take BPTT, GRU: 2.001")
    assert "equal within the noise to plain Transformer (2.000), and it generates fastest" in words
    assert [one.key for one in ranked_networks(race)[1]] == ["gru", "attention"]


def test_a_compressor_that_is_better_than_all_networks_is_named_first():
    words = verdict_of_race(finished(ppmd=1.5, gru=2.0, lstm=2.4), "byte")
    assert words.startswith("For this data take ppmd, which is no network: 1.500 bits per byte, ")
    assert "0.500 (25%) less than the best network" in words
    assert "To generate, or with more minutes, take BPTT, GRU" in words


def test_a_faster_network_is_mentioned():
    words = verdict_of_race(finished(gru=2.5, lstm=2.0), "byte")
    assert words.endswith("a generated token takes 2.00 ms, 1.00 with BPTT, GRU.")


def test_problems_and_unequal_shares_of_the_processor_are_noted():
    race = finished(gru=2.0)
    race.results["lstm"] = {"problem": "diverged at every rate", "factor": None}
    race.results["gru"]["factor"] = 9.0
    race.shares = {"gru": {"cpu": 9.0, "seconds": 10.0}, "bptt": {"cpu": 4.0, "seconds": 10.0}}
    problem, rates, shares = notes_of_race(race)
    assert problem == "BPTT, LSTM: diverged at every rate"
    assert rates.startswith("the best rate was the smallest or the largest tried: gru;")
    assert "bptt had 0.40 of a core, gru 0.90" in shares
    assert "lstm" not in [one["key"] for one in race_json(race, "byte")["entries"]]
    assert verdict_of_race(RaceFile(Path("race"), PLAN), "byte").startswith("No network")
