"""A run knows the task and the cell it was made of, and is never opened with others."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conftest import TINY
from memtrain import cli
from memtrain.data.task import Task, check_task
from memtrain.errors import MemtrainError
from memtrain.generation.pretrained import load_rnn
from memtrain.recipes import recipe
from memtrain.runs.checkpoint import load_weights
from memtrain.runs.fingerprint import describe_cell
from memtrain.runs.run_folder import read_run_file
from memtrain.shapes import Batch
from memtrain.training.run import Run
from run_testing import CountingReporter, assert_same_weights

SHORT = replace(
    TINY,
    smt=replace(TINY.smt, steps=2),
    dmt=replace(TINY.dmt, steps=2),
    bptt=replace(TINY.bptt, steps=0),
)


class Echo(Task):
    """The target is the input `back` tokens ago."""

    vocab_size, sequence_length = 4, 6

    def __init__(self, back: int = 0) -> None:
        self.back = back

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(4, (count, 6), generator=generator)
        return Batch(tokens, tokens.roll(self.back, 1))


class Cell(nn.Module):
    """Equal shapes for all arguments."""

    memory_tokens, memory_dim = 1, 8

    def __init__(self, vocab_size: int = 4, normalize: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.normalize = normalize
        self.embedding = nn.Embedding(vocab_size, 8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(drop)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        x = self.linear(self.dropout(memory)) + self.embedding(token)[:, None]
        return nn.functional.rms_norm(x, (8,)) if self.normalize else torch.tanh(x)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("made") / "run"
    run = Run.create(SHORT, folder, task=Echo(), cell=Cell(normalize=True))
    return run.train(until="smt")


@pytest.fixture
def folder(trained: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture(params=["whole", "copied"])
def either(request, folder: Path) -> Path:
    """The folder as it is, or config and checkpoints alone."""
    if request.param == "copied":
        (folder / "run.json").unlink()
    return folder


def refused(capsys, *command: str) -> str:
    assert cli.main(list(command)) == 2
    return capsys.readouterr().err.strip()


def test_a_run_opens_with_the_same_objects(trained: Run, either: Path):
    reporter = CountingReporter()
    opened = Run.open(either, task=Echo(), cell=Cell(normalize=True), reporter=reporter)
    assert_same_weights(trained, opened)
    assert not reporter.messages and opened.train().finished


def test_evaluation_and_training_need_the_task(either: Path, capsys):
    before = {path: path.stat().st_mtime_ns for path in either.rglob("*")}
    needs = r"test_fingerprint:Echo; pass allow_code=True .*or the object itself, task=\.\.\."
    with pytest.raises(MemtrainError, match=needs):
        Run.open(either, cell=Cell(normalize=True))
    for command in ("eval", "resume", "generate"):
        message = refused(capsys, command, str(either))
        assert "this run imports test_fingerprint:Cell; pass --allow-code" in message
    assert {path: path.stat().st_mtime_ns for path in either.rglob("*")} == before


@pytest.mark.parametrize(
    ("task", "cell", "message"),
    [
        (
            Echo(1),
            Cell(normalize=True),
            r"task=test_fingerprint:Echo \(back=1\): is not the task .*",
        ),
        (Echo(), Cell(), r"cell=.*Cell \(normalize=False\): is not the cell .*outputs differ"),
        (Echo(), Cell(normalize=True, drop=0.5), "is not the cell .*layers differ"),
    ],
    ids=["task", "cell", "dropout"],
)
def test_another_object_is_refused(either: Path, task: Task, cell: nn.Module, message: str):
    with pytest.raises(MemtrainError, match=message + r".*; pass the same object, Run\.open"):
        Run.open(either, task=task, cell=cell)


def test_another_cell_is_refused_by_load_rnn(either: Path):
    assert load_rnn(either, cell=Cell(normalize=True)).spelling is None
    with pytest.raises(MemtrainError, match="is not the cell that this run was made with"):
        load_rnn(either, cell=Cell())


def test_a_class_made_without_the_arguments_is_recognised_as_another(either: Path, capsys):
    """Cell() is not Cell(normalize=True), which no config names."""
    before = (either / "metrics.jsonl").read_bytes()
    for command in ("eval", "resume", "generate"):
        message = refused(capsys, command, str(either), "--allow-code")
        assert "test_fingerprint:Cell (normalize=False): is not the cell" in message
        assert "made with, test_fingerprint:Cell (normalize=True): its outputs differ" in message
    assert (either / "metrics.jsonl").read_bytes() == before


def test_a_class_that_builds_the_same_object_may_be_imported(tmp_path: Path, capsys):
    run = Run.create(SHORT, tmp_path / "run", task=Echo(), cell=Cell()).train(until="smt")
    assert cli.main(["eval", str(tmp_path / "run"), "--allow-code", "--sequences", "4"]) == 0
    assert_same_weights(run, Run.open(tmp_path / "run", allow_code=True))


def test_objects_for_a_run_that_its_config_describes_are_refused(tmp_path: Path):
    Run.create(SHORT, tmp_path / "run").train(until="smt")
    with pytest.raises(MemtrainError, match="names; leave task= out"):
        Run.open(tmp_path / "run", task=Echo())
    with pytest.raises(MemtrainError, match="names; leave cell= out"):
        Run.open(tmp_path / "run", cell=Cell())


def test_the_config_names_the_class_of_an_object(tmp_path: Path):
    small = replace(SHORT, data=recipe("custom").data)
    for number, config in enumerate((SHORT, small)):
        Run.create(config, tmp_path / str(number), task=Echo())
        plain = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert plain["data"]["path"] == "test_fingerprint:Echo"


def test_a_local_class_is_recorded_too(tmp_path: Path):
    class Local(Echo):
        pass

    Run.create(SHORT, tmp_path / "run", task=Local()).train(until="smt")
    found = read_run_file(tmp_path / "run")
    assert found is not None and "<locals>.Local" in found.made_of["task"]["class"]
    assert Run.open(tmp_path / "run", task=Local()).progress.stage == 1
    with pytest.raises(MemtrainError, match="has no class Local"):
        Run.open(tmp_path / "run", allow_code=True)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_cell_is_recorded_without_compilation_and_opens_uncompiled(tmp_path: Path):
    compiled = torch.compile(Cell(normalize=True), backend="eager")
    assert isinstance(compiled, nn.Module)
    run = Run.create(SHORT, tmp_path / "run", cell=compiled)
    assert run.config.cell.kind == "test_fingerprint:Cell"
    opened = Run.open(tmp_path / "run", cell=Cell(normalize=True))
    load_weights(opened.rnn, run.rnn.state_dict(), "a checkpoint")
    left, right = run.rnn.cell.parameters(), opened.rnn.cell.parameters()
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_with_another_torch_a_difference_is_a_warning(folder: Path):
    path = folder / "run.json"
    plain = json.loads(path.read_text())
    plain["made_of"]["task"] |= {"torch": "1.0"}
    plain["made_of"]["task"]["behaviour"]["sample"] = "other"
    path.write_text(json.dumps(plain))
    reporter = CountingReporter()
    Run.open(folder, task=Echo(), cell=Cell(normalize=True), reporter=reporter)
    assert (
        len(reporter.messages) == 1
        and "training sequences differ, which may" in reporter.messages[0]
    )


@pytest.mark.parametrize(
    "record", [[], {"x": {}}, {"cell": 3}, {"cell": {"class": 1, "behaviour": {}}}]
)
def test_a_damaged_record_is_refused_with_a_reason(folder: Path, record):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"made_of": record}))
    with pytest.raises(MemtrainError, match="made_of: is not the record"):
        Run.open(folder, task=Echo(), cell=Cell(normalize=True))


@pytest.mark.parametrize("value", [None, [], ["x"], [10**400], [1e999], 3])
def test_a_record_with_other_numbers_is_another_cell(folder: Path, value):
    path = folder / "run.json"
    plain = json.loads(path.read_text())
    plain["made_of"]["cell"]["behaviour"]["step"] = value
    path.write_text(json.dumps(plain))
    with pytest.raises(MemtrainError, match="is not the cell"):
        Run.open(folder, task=Echo(), cell=Cell(normalize=True))


def test_the_record_of_a_cell_depends_on_neither_weights_nor_batches(monkeypatch):
    torch.manual_seed(0)
    one = describe_cell(TINY, Cell(), 4, given=True)
    torch.manual_seed(1)
    cell = Cell()
    before = torch.get_rng_state()
    state = {name: value.clone() for name, value in cell.state_dict().items()}
    assert describe_cell(TINY, cell, 4, given=True) == one
    assert torch.equal(torch.get_rng_state(), before) and cell.training
    assert all(torch.equal(value, state[name]) for name, value in cell.state_dict().items())
    assert len(json.dumps(one)) < 2000


def test_a_task_that_ignores_its_generator_is_refused(tmp_path: Path):
    class Careless(Echo):
        def sample(self, count: int, generator: torch.Generator) -> Batch:
            tokens = torch.randint(4, (count, 6))
            return Batch(tokens, tokens)

    with pytest.raises(MemtrainError, match="two calls with equally seeded generators differ"):
        check_task(Careless())
    with pytest.raises(MemtrainError, match=r"Careless\.sample"):
        Run.create(SHORT, tmp_path / "run", task=Careless())
    assert not (tmp_path / "run").exists()
