"""memtrain resume with options, train --from and --track, and wrong commands of both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused, save

from conftest import TINY
from memtrain.cli import main
from memtrain.training.console import Reporter
from memtrain.training.run import Run

SMT = replace(TINY, dmt=replace(TINY.dmt, steps=0), bptt=replace(TINY.bptt, steps=0))


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(folder: str) -> dict:
    return json.loads(Path(folder, "config.json").read_text())


def test_both_commands_lengthen_a_finished_run(here: Path, capsys):
    save(SMT)
    assert main(["train", "tiny.json", "--folder", "run"]) == 0
    assert main(["resume", "run"]) == 0
    assert "train it longer with: memtrain resume run --smt.steps 24" in capsys.readouterr().out
    assert main(["resume", "run", "--log.keep", "5"]) == 0
    assert "not changed, because no step is left: log.keep=5" in capsys.readouterr().out
    assert main(["resume", "run", "--smt.steps", "14"]) == 0
    assert "run: smt.steps is now 14, was 12" in capsys.readouterr().err
    again = ["train", "tiny.json", "--folder", "run", "--resume"]
    assert main([*again, "--smt.steps", "16", "--log.evaluate-every", "4"]) == 0
    assert Run.open("run").progress.stages[0].steps == 16
    assert config_of("run")["log"]["evaluate_every"] == 4
    assert main(again) == 0  # no option, no change


def test_train_starts_from_another_run_and_records_it(here: Path, capsys):
    save(SMT)
    assert main(["train", "tiny.json", "--folder", "a"]) == 0
    options = ["--smt.optimizer", "muon", "--smt.optimizer-options", "momentum", "0.9"]
    assert main(["train", "tiny.json", "--folder", "b", "--from", "a", *options]) == 0
    assert config_of("b")["initial"] == "a/checkpoints/00000012"
    assert config_of("b")["smt"]["optimizer_options"] == {"momentum": 0.9}


def test_dmt_alone_takes_the_teacher_of_another_run(here: Path, capsys):
    save(SMT)
    assert main(["train", "tiny.json", "--folder", "a"]) == 0
    options = ["--smt.steps", "0", "--dmt.steps", "4"]
    assert main(["train", "tiny.json", "--folder", "b", *options, "--from", "a"]) == 0
    assert [stage.name for stage in Run.open("b").progress.stages] == ["dmt"]
    assert main(["train", "tiny.json", "--folder", "c", *options]) == 2
    assert "or --from a run that has one" in capsys.readouterr().err


def test_trackers_are_named_at_the_end_and_continue(here: Path, capsys):
    pytest.importorskip("tensorboard")
    save(SMT)
    assert main(["train", "tiny.json", "--folder", "run", "--track", "tensorboard"]) == 0
    assert "tensorboard --logdir run/tensorboard" in capsys.readouterr().out
    assert main(["resume", "run", "--smt.steps", "14"]) == 0
    assert "tensorboard --logdir run/tensorboard" in capsys.readouterr().out
    assert json.loads(Path("run/tracking.json").read_text())["steps"] == {"tensorboard": 14}


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    Run.create(TINY, folder / "run").train(Reporter(), until="dmt")
    save(TINY, folder / "tiny.json")
    return folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("resume run --smt.steps 20", "smt.steps=20: run has trained smt and then dmt; only dmt"),
        ("resume run --dmt.steps 2", "dmt.steps=2: run has trained 8 steps of dmt already"),
        ("resume run --seed 3", "seed=3: the run has seed=0, and a run keeps its config"),
        ("resume run --dmt.optimizer muon", "dmt.optimizer=muon: run has trained 8 steps"),
        ("resume run --steps 20", "--steps: no such option; did you mean --smt.steps?"),
        ("resume run --dmt.steps", "--dmt.steps: needs a value"),
        ("resume run --dmt.steps many", "--dmt.steps=many: must be a whole number"),
        ("resume run --from run", "--from: no such option; see memtrain resume --help"),
        ("resume run --track tensorbord", "track='tensorbord': did you mean tensorboard?"),
        ("train tiny.json --folder run --resume --seed 3", "the run has seed=0"),
        ("train tiny.json --folder run --resume --from run", "--resume and --from: choose one"),
        ("train tiny.json --from nowhere", "--from nowhere: no run there; a run's folder, or"),
        ("train tiny.json --from mnist-small", "initial=mnist-small: "),
        ("train tiny.json --from run --cell.width 8", "initial=run/checkpoints/00000020: "),
        ("train tiny.json --initial run", "--initial: no such option; did you mean --from?"),
        ("train tiny.json --wandb", "--wandb: no such option; did you mean --track?"),
        ("train tiny.json --track wandb --track trackio", "given twice; several as a,b"),
        ("train tiny.json --smt.optimizer nadam", "smt: optimizer='nadam': must be adamw or muon"),
        (
            "train tiny.json --smt.optimizer torch.optim:Nadam",
            "smt.optimizer=torch.optim:Nadam: it has no class Nadam, but ['NAdam'",
        ),
        (
            "train tiny.json --smt.optimizer torch.optim:LBFGS --smt.weight-decay 0",
            "smt.optimizer=torch.optim:LBFGS with no options: ValueError: LBFGS doesn't support",
        ),
        (
            "train tiny.json --smt.optimizer torch.optim:LBFGS",
            "optimizer=torch.optim:LBFGS has none; set weight_decay to 0",
        ),
        (
            "train tiny.json --smt.optimizer collections:OrderedDict",
            "must be a subclass of torch.optim.Optimizer",
        ),
        (
            "train tiny.json --smt.optimizer-options epsilon 1e-6",
            "smt.optimizer_options: adamw takes no epsilon; did you mean eps?",
        ),
        (
            "train tiny.json --smt.optimizer torch.optim:SGD --smt.optimizer-options momentum -1",
            "smt.optimizer=torch.optim:SGD with momentum=-1: ValueError: Invalid momentum",
        ),
        ("train tiny.json --smt.schedule cos", "must be one of constant, cosine, linear, wsd"),
        ("train tiny.json --smt.floor 0.1", "smt: floor=0.1: a constant schedule does not fall"),
        (
            "train tiny.json --smt.optimizer muon --engine.shard-teacher",
            "smt.optimizer=muon with engine.shard_teacher: only adamw updates sharded weights",
        ),
        ("train tiny.json --smt.patience -1", "smt: patience=-1: must be at least 0"),
    ],
)
def test_wrong_commands_are_one_line_with_a_remedy(
    there: Path, monkeypatch, capsys, command: str, words: str
):
    monkeypatch.chdir(there)
    before = sorted(there.rglob("*"))
    assert words in refused(capsys, *command.split())
    assert sorted(there.rglob("*")) == before  # nothing was made
