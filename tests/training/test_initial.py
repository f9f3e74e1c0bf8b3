"""Runs that start from the weights of another run, or of a pretrained model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memtrain
from conftest import TINY
from memtrain.config import Parity, Retrieval, RunConfig
from memtrain.errors import MemtrainError
from memtrain.runs.progress import Progress
from memtrain.training.console import Reporter
from memtrain.training.initial import Initial, check_meaning, read_initial
from memtrain.training.run import Run
from run_testing import CountingReporter, weights

SMT = replace(
    TINY,
    smt=replace(TINY.smt, steps=6),
    dmt=replace(TINY.dmt, steps=0),
    bptt=replace(TINY.bptt, steps=0),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    Run.create(SMT, folder).train(Reporter())
    return folder


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path, trained: Path):
    run = Run.create(replace(SMT, seed=5), tmp_path / "b", initial=trained)
    before = weights(Run.open(trained))
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
    assert run.config.initial == str(trained / "checkpoints" / "00000006")
    assert run.progress.global_step == 0 and not run.progress.stages
    run.train(Reporter())
    reopened = Run.open(tmp_path / "b")
    assert reopened.config.initial == run.config.initial and reopened.finished
    again = Run.create(reopened.config, tmp_path / "c")  # the config alone starts there too
    assert all(torch.equal(value, before[name]) for name, value in weights(again).items())


def test_dmt_alone_starts_from_a_run_that_has_a_teacher(tmp_path: Path, trained: Path):
    alone = {
        "smt": replace(TINY.smt, steps=0),
        "dmt": TINY.dmt,
        "bptt": replace(TINY.bptt, steps=0),
    }
    with pytest.raises(MemtrainError, match="DMT needs the teacher .* or initial, to a run"):
        replace(TINY, **alone)
    config = replace(TINY, initial=str(trained), **alone)
    run = Run.create(config, tmp_path / "dmt").train(Reporter())
    teacher = Run.open(trained).teacher
    assert teacher is not None and run.teacher is not None
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, run.teacher.state_dict()[name]), name


def test_bptt_takes_the_rnn_alone(tmp_path: Path, trained: Path):
    config = replace(TINY, smt=replace(TINY.smt, steps=0), dmt=replace(TINY.dmt, steps=0))
    run = Run.create(config, tmp_path / "bptt", initial=trained)
    assert run.teacher is None
    expected = Run.open(trained).rnn.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in run.rnn.state_dict().items())


def test_an_rnn_without_a_teacher_says_what_starts_from_nothing(tmp_path: Path, trained: Path):
    reporter = CountingReporter()
    model = memtrain.load_rnn(trained)
    run = Run.create(SMT, tmp_path / "b", initial=model, reporter=reporter)
    assert reporter.messages == ["tiny: has no teacher; this run's starts from nothing"]
    assert run.config.initial == "tiny"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cell": replace(TINY.cell, width=8, head_dim=4)},
            r"rnn.cell.* is \(.*\), here \(.*its config has .*cell.width=16 \(here 8\)",
        ),
        ({"data": Retrieval(sequence_length=6, vocab_size=5)}, r"is \(.*, here \("),
        (
            {"data": Parity(sequence_length=6)},
            "was trained on retrieval, this run is of parity, and their tokens mean different",
        ),
    ],
)
def test_other_shapes_and_tasks_are_refused_in_one_line(
    tmp_path: Path, trained: Path, change: dict, words: str
):
    with pytest.raises(MemtrainError, match=words):
        Run.create(replace(SMT, **change), tmp_path / "b", initial=trained)
    assert not (tmp_path / "b").exists()


def test_a_source_that_is_no_run_is_refused(tmp_path: Path, trained: Path):
    for source, words in (
        (tmp_path / "nowhere", "no run there, and no checkpoint of one"),
        ("mnist-small", r"initial=memtrain.load_pretrained"),
        (trained / "checkpoints" / "00000001", "this checkpoint is gone"),
        (torch.nn.Linear(2, 2), "initial=Linear: must be the folder of a run"),
    ):
        with pytest.raises(MemtrainError, match=words):
            read_initial(source)
    fresh = tmp_path / "fresh"
    Run.create(SMT, fresh)
    with pytest.raises(MemtrainError, match="has no checkpoint to start from"):
        Run.create(SMT, tmp_path / "b", initial=fresh)


TEXT = {"vocab_size": 256, "start_token": 10, "text": True, "picture": None, "alphabet": [10, 65]}


def meaning(before: dict | None, now: dict | None, **others) -> None:
    config = RunConfig(smt=replace(TINY.smt, steps=1))
    check_meaning(
        Initial("a", {}, config, Progress(spelling=before)), config, Progress(spelling=now)
    )


def test_vocabularies_must_agree_in_meaning():
    meaning(TEXT, TEXT | {"alphabet": [1, 2], "start_token": 3})  # another text
    picture = {"height": 8, "width": 8, "levels": 16, "patch": 2}
    image = TEXT | {"text": False, "picture": picture}
    meaning(image, image | {"picture": picture | {"height": 12}})
    with pytest.raises(MemtrainError, match="there text=True, here text=False"):
        meaning(TEXT, TEXT | {"text": False})
    with pytest.raises(MemtrainError, match="there levels=16, here levels=4; prepare the data"):
        meaning(image, image | {"picture": picture | {"levels": 4, "patch": 4}})
    with pytest.raises(MemtrainError, match="start from a run on data of the same kind"):
        meaning(TEXT, None)


def test_columns_of_numbers_must_agree():
    config = RunConfig(smt=replace(TINY.smt, steps=1))
    one = Progress(series={"targets": ["a"], "known": []}, values={"features": 1})
    with pytest.raises(MemtrainError, match=r"there targets=\['a'\], here targets=\['b'\]"):
        check_meaning(
            Initial("x", {}, config, one),
            config,
            Progress(series={"targets": ["b"], "known": []}, values={"features": 1}),
        )


def test_a_pretrained_model_is_read_with_its_codec():
    found = read_initial(memtrain.load_pretrained("mnist-small"))
    assert found.source == "mnist-small" and all(name.startswith("rnn.") for name in found.weights)
    assert isinstance(found.progress.spelling, dict) and found.progress.spelling["picture"]


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(MemtrainError, match="initial: File name too long, xxx.*; name a run"):
        read_initial(300 * "x")
