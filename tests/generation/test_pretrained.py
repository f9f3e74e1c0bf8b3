"""Exported models load and generate the same samples; damage is one line."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from conftest import TINY, random_tokens
from memtrain.config import Digits
from memtrain.errors import MemtrainError
from memtrain.generation import pretrained
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import export, load_pretrained, load_rnn, pretrained_names
from memtrain.runs.progress import StageProgress
from memtrain.training.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run of digits with the record of a trained one."""
    config = replace(TINY, name="digits", data=Digits())
    run = Run.create(config, tmp_path_factory.mktemp("runs") / "digits")
    run.progress.stages.append(StageProgress("smt", 7, steps=3, tokens=12, seconds=0.5))
    return run


@pytest.fixture
def again(trained_digits: Run, tmp_path: Path) -> Path:
    """A copy of its folder, to do as one likes with."""
    return shutil.copytree(trained_digits.folder, tmp_path / "run")


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    export(run, "tiny-digits", tmp_path, notes={"nats": 1.5})
    return tmp_path


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_an_exported_model_loads_without_its_teacher(run, tmp_path: Path, dtype, error):
    paths = export(run, "tiny-digits", tmp_path, dtype=dtype)
    assert pretrained_names(tmp_path) == ["tiny-digits"]
    model = load_pretrained("tiny-digits", folder=tmp_path)
    weights = sum(p.numel() for p in run.rnn.parameters())
    assert 2 * weights < paths[0].stat().st_size < 2 * weights + 8192
    assert {p.dtype for p in model.rnn.parameters()} == {torch.float32}
    tokens = random_tokens(4, 5)
    assert_close(model.rnn.read(tokens), run.rnn.read(tokens), atol=error * 5, rtol=error * 5)
    assert model.spelling == run.spelling and model.config == run.config
    assert generate(model, count=2).pictures().shape == (2, 8, 8)


def test_load_rnn_needs_only_config_and_checkpoints(trained_digits: Run, again: Path):
    model = load_rnn(again)
    assert (model.spelling, model.config) == (trained_digits.spelling, trained_digits.config)
    assert model.trained["stages"] == trained_digits.progress.stages_json()
    tokens = random_tokens(4, 5)
    assert_close(model.rnn.read(tokens), trained_digits.rnn.read(tokens))
    assert not model.rnn.training
    state = newest_state(again)
    edit_progress(state, spelling=json.loads(state.read_text())["progress"]["spelling"] | {"x": 1})
    with pytest.raises(
        MemtrainError, match="checkpoint: spelling: x: TokenCodec has no such field"
    ):
        load_rnn(again)
    edit_progress(state, spelling={})
    with pytest.raises(MemtrainError, match="its checkpoint: spelling: vocab_size: missing"):
        load_rnn(again)


def newest_state(run: Path) -> Path:
    return max((run / "checkpoints").iterdir()) / "state.json"


def edit_progress(state: Path, **values) -> None:
    """Change what a checkpoint says, its checksum too; values of None are taken out."""
    plain = json.loads(state.read_text())
    plain["progress"] = {
        key: value for key, value in (plain["progress"] | values).items() if value is not None
    }
    plain.pop("progress_sha256", None)
    state.write_text(json.dumps(plain))


def test_a_run_of_an_older_memtrain_takes_the_codec_from_its_data(trained_digits: Run, again: Path):
    edit_progress(newest_state(again), spelling=None)
    assert load_rnn(again).spelling == trained_digits.spelling


def test_an_rnn_too_large_for_this_machine_is_refused_before_it_is_built(again: Path):
    path = again / "config.json"
    plain = json.loads(path.read_text())
    plain["cell"] |= {"width": 2**16, "layers": 64}
    path.write_text(json.dumps(plain))
    with pytest.raises(MemtrainError, match="the models have .* parameters"):
        load_rnn(again)


def test_load_rnn_explains_why_it_cannot_load(tmp_path: Path):
    with pytest.raises(MemtrainError, match="no run there"):
        load_rnn(tmp_path / "nowhere")
    Run.create(replace(TINY, data=Digits()), tmp_path / "begun")
    with pytest.raises(MemtrainError, match="has no checkpoint yet"):
        load_rnn(tmp_path / "begun")


def test_load_rnn_of_a_task_without_sequences_loads_but_does_not_generate(trained_tiny: Run):
    run, model = trained_tiny, load_rnn(trained_tiny.folder)
    assert model.spelling is None
    tokens = random_tokens(4, 5) % run.task.vocab_size
    assert_close(model.rnn.read(tokens), run.rnn.read(tokens))
    with pytest.raises(MemtrainError, match="has no sequences to sample"):
        generate(model)


def test_the_card_holds_the_training_record(folder: Path):
    card = json.loads((folder / "tiny-digits.json").read_text())
    assert card["trained"]["nats"] == 1.5
    assert card["trained"]["stages"][0]["steps"] == 3
    assert load_pretrained("tiny-digits", folder=folder).trained == card["trained"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.fill_(float("nan")),
            r"tiny-digits\.safetensors: weights hold values that are",
        ),
        (lambda w: w.to(torch.int8), r"is torch\.int8, not torch\.float32"),
    ],
    ids=["nan", "int8"],
)
def test_weights_that_are_not_finite_numbers_are_refused(folder: Path, change, message: str):
    path = folder / "tiny-digits.safetensors"
    tensors = load_file(path)
    tensors["readout.head.weight"] = change(tensors["readout.head.weight"])
    save_file(tensors, path)
    edit(folder, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(MemtrainError, match=message):
        load_pretrained("tiny-digits", folder=folder)


def test_an_unknown_name_suggests_the_nearest(folder: Path):
    with pytest.raises(MemtrainError, match="did you mean tiny-digits?"):
        load_pretrained("tiny-digit", folder=folder)
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(MemtrainError, match="holds none"):
        load_pretrained("tiny-digits", folder=empty)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "tiny-digits.safetensors").unlink(), "its weights are missing"),
        (lambda f: (f / "tiny-digits.safetensors").write_bytes(b"x"), "checksum"),
        (lambda f: (f / "tiny-digits.json").write_text("{"), "damaged"),
        (lambda f: (f / "tiny-digits.json").write_text("{}"), "damaged"),
        (lambda f: edit(f, version=2), "version 2, update memtrain"),
        (lambda f: edit(f, spelling={"vocab": 3}), "spelling"),
        (lambda f: edit(f, spelling={"vocab_size": 3, "start_token": 3}), "start_token=3: must be"),
        (lambda f: edit_cell(f, "evil:Cell"), "imports its cell, evil:Cell; allow_code=True"),
        (lambda f: edit(f, trained=3), "damaged"),
        (lambda f: edit(f, sha256="../" * 30), "must be 64 hexadecimal digits"),
        (lambda f: (f / "tiny-digits.json").write_text(" " * 2**26), "larger than"),
        (lambda f: os.truncate(f / "tiny-digits.safetensors", 2**30), "larger than"),
        (lambda f: pipe(f / "tiny-digits.json"), "is not a regular file"),
    ],
    ids=[
        "gone",
        "changed",
        "broken",
        "empty",
        "newer",
        "spelling",
        "start",
        "code",
        "trained",
        "traversal",
        "large",
        "sparse",
        "pipe",
    ],
)
def test_damage_is_one_line(folder: Path, harm, message: str):
    harm(folder)
    with pytest.raises(MemtrainError) as caught:
        load_pretrained("tiny-digits", folder=folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edit(folder: Path, **values) -> None:
    path = folder / "tiny-digits.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_cell(folder: Path, kind: str) -> None:
    config = json.loads((folder / "tiny-digits.json").read_text())["config"]
    config["cell"]["kind"] = kind
    edit(folder, config=config)


def test_an_interrupted_export_leaves_the_old_model_or_the_new_one(
    run: Run, folder: Path, monkeypatch
):
    """Each file operation of an export fails once."""
    old = weights_in(folder)
    other = Run(replace(run.config, seed=1), folder)
    other.progress = run.progress
    with torch.no_grad():
        other.rnn.readout.head.weight.add_(1)
    seen = []
    for failing in range(20):
        calls = 0

        def count(real, limit=failing):
            def operation(*arguments, **options):
                nonlocal calls
                calls += 1
                if calls > limit:
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)

            return operation

        with monkeypatch.context() as patch:
            for module, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
                patch.setattr(module, name, count(getattr(module, name)))
            try:
                export(other, "tiny-digits", folder)
            except OSError:
                seen.append(torch.equal(weights_in(folder), old))
                continue
        break
    assert seen[0] and not seen[-1] and seen == sorted(seen, reverse=True)  # old, then new
    assert not torch.equal(weights_in(folder), old)
    assert sorted(p.name for p in folder.iterdir() if "draft" not in p.name) == [
        "tiny-digits.json",
        "tiny-digits.safetensors",
    ]


def weights_in(folder: Path) -> torch.Tensor:
    return load_pretrained("tiny-digits", folder=folder).rnn.readout.head.weight


def test_export_explains_why_it_cannot_export(run: Run, tmp_path: Path):
    with pytest.raises(MemtrainError, match="name='../x'"):
        export(run, "../x", tmp_path)
    untrained = Run(run.config, tmp_path)
    with pytest.raises(MemtrainError, match="not trained yet"):
        export(untrained, "x", tmp_path)
    answers = Run(TINY, tmp_path)
    with pytest.raises(MemtrainError, match="writes nothing"):
        export(answers, "x", tmp_path)
    assert not list(tmp_path.iterdir())


def test_bundled_models_load_and_generate():
    """Whatever models are in the package: each is whole and small, and says what it is."""
    home = Path(pretrained.__file__).parent / "weights"
    for name in pretrained_names():
        assert (home / f"{name}.safetensors").stat().st_size <= 4 * 2**20
        model = load_pretrained(name)
        assert model.spelling is not None
        length = None if model.spelling.picture else 16
        assert np.isfinite(generate(model, count=1, length=length).tokens).all()


def test_mnist_small_draws_pen_strokes_inside_a_blank_margin():
    pictures = generate(load_pretrained("mnist-small"), count=8, seed=0).pictures()
    pictures = pictures / pictures.max()
    assert pictures.shape == (8, 28, 28)
    assert 0.05 < pictures.mean() < 0.3
    assert pictures[:, :2].mean() < 0.01 and pictures[:, :, :2].mean() < 0.01


def test_weights_travel_with_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "generation/weights/*.safetensors" in text and "generation/weights/*.json" in text
