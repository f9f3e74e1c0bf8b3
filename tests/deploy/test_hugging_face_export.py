"""`memtrain export RUN --hf DIR`: the folder, its model card, its upload, and what is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from hugging_face_testing import MARKED, TOKENS, Options, exported
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from conftest import TINY
from memtrain.cli import main
from memtrain.data.codec import TokenCodec
from memtrain.deploy.hugging_face.export import write
from memtrain.errors import MemtrainError
from memtrain.generation.generate import generate
from memtrain.models.cells import build_cell
from memtrain.shapes import Values
from memtrain.training.run import Run
from model_testing import TEXT, decided_model

WITHOUT_MEMTRAIN = """\
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("memtrain", "jaxtyping"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import json
from transformers import AutoModelForCausalLM, AutoTokenizer

found = {}
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    inputs = tokenizer("Once upon", return_tensors="pt")
    found[name] = model.generate(**inputs, max_new_tokens=20)[0].tolist()
model.save_pretrained("saved")
again = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
assert again.generate(**inputs, max_new_tokens=20)[0].tolist() == found[name]
print(json.dumps(found))
"""


def test_the_folder_works_without_memtrain(tmp_path: Path):
    expected = {}
    kinds = ("transformer", "lstm")
    for kind in kinds:
        original = decided_model(TEXT, kind)
        exported(tmp_path / kind, original)
        expected[kind] = generate(original, prompt="Once upon", length=20, temperature=0.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lstm")
    model.save_pretrained(tmp_path / "resaved")  # with memtrain: the code is written again
    (tmp_path / "resaved/tokenizer.json").write_bytes(
        (tmp_path / "lstm/tokenizer.json").read_bytes()
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMTRAIN, *kinds, "resaved"],
        cwd=tmp_path,
        env=environment | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in kinds:
        assert found[kind] == expected[kind].tokens[0].tolist()
    assert found["resaved"] == found["lstm"]


@pytest.fixture
def digits(trained_digits: Run) -> Run:
    return Run.open(trained_digits.folder)


def test_a_run_is_exported_on_the_command_line(digits: Run, tmp_path: Path, capsys):
    folder = tmp_path / "exported"
    assert main(["export", str(digits.folder), "--hf", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_memtrain.py",
    ]
    assert lines[0].startswith(f"{folder}  5 files, ") and "no tokenizer" in lines[1]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(17, (2, 5))
    assert_close(model(tokens).logits, digits.rnn.eval()(tokens))
    made = model.generate()  # an image after its start token
    assert digits.spelling is not None
    assert made.shape == (1, 65) and made[0, 0] == digits.spelling.start_token
    expected = generate(digits, temperature=0.0)
    assert made[0, 1:].tolist() == expected.tokens[0].tolist()


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that must fail."""
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("memtrain: ")
    return message


def test_a_run_is_not_overwritten_by_its_export(digits: Run, capsys):
    before = (digits.folder / "config.json").read_bytes()
    message = refused(capsys, "export", str(digits.folder), "--hf", str(digits.folder))
    assert "config.json of something else" in message
    assert (digits.folder / "config.json").read_bytes() == before


def test_an_export_replaces_an_earlier_one(tmp_path: Path):
    exported(tmp_path, decided_model())
    assert (tmp_path / "tokenizer.json").exists()
    (tmp_path / "notes.txt").write_text("mine")
    exported(tmp_path, decided_model(TOKENS))
    assert not (tmp_path / "tokenizer.json").exists() and (tmp_path / "notes.txt").exists()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 9


def test_files_of_something_else_are_not_replaced(tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(MemtrainError, match="holds the README.md of something else"):
        write(decided_model(), tmp_path, Options())
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemtrainError, match="is a file"):
        write(decided_model(), tmp_path / "file", Options())


def test_weights_are_the_network_and_rows_for_special_tokens(tmp_path: Path):
    original = decided_model()
    weights = load_file(exported(tmp_path, original) / "model.safetensors")
    for name, value in original.state_dict().items():
        assert torch.equal(weights[name][: len(value)], value)
    embedding = weights["cell.embedding.weight"]
    assert torch.equal(embedding[256:], embedding[[10, 10, 10]])


def test_the_card_has_what_the_run_recorded(tmp_path: Path):
    card = (exported(tmp_path / "stories", decided_model()) / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "| SMT | 3 | 12 | 0.5 | 1.2500 nats per character |" in card
    assert 'from_pretrained("stories", trust_remote_code=True)' in card
    images = (exported(tmp_path / "images", decided_model(MARKED)) / "README.md").read_text()
    assert "pipeline_tag" not in images and "4..5: cat, dog" in images


@pytest.mark.parametrize("codec", [TEXT, TOKENS, MARKED], ids=["text", "tokens", "marked"])
def test_the_example_of_the_card_runs(tmp_path: Path, monkeypatch, capsys, codec: TokenCodec):
    card = (exported(tmp_path / "model", decided_model(codec)) / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(card.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: decided_model(None), "asks for answers"),
        (lambda: with_cell("attention"), "cell.kind=attention: is not exported"),
        (lambda: with_cell("torch.nn:GRUCell", input_size=8, hidden_size=8), "built-in recurrent"),
    ],
)
def test_networks_that_cannot_be_exported_are_refused(tmp_path: Path, model: Any, message: str):
    with pytest.raises(MemtrainError, match=message):
        write(model(), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()


def with_cell(kind: str, **options: Any) -> Any:
    found = decided_model()
    config = replace(TINY.cell, kind=kind, options=options)
    stages = {name: replace(getattr(TINY, name), steps=0) for name in ("smt", "dmt")}
    found.config = replace(TINY, cell=config, **stages)
    found.cell = build_cell(config, 256)
    return found


def test_a_network_of_numbers_is_refused(tmp_path: Path):
    found = decided_model()
    found.readout.space = Values(2)
    with pytest.raises(MemtrainError, match="reads numbers"):
        write(found, tmp_path / "out", Options())


def test_a_network_of_another_cell_than_its_config_is_refused(tmp_path: Path):
    found = decided_model(TEXT, "gru")
    found.config = TINY
    with pytest.raises(MemtrainError, match="cell.kind=transformer: is not exported"):
        write(found, tmp_path / "out", Options())


class Hub:
    """Stands for huggingface.co."""

    def __init__(self, monkeypatch, token: str | None = "secret") -> None:
        self.uploads: list[dict[str, Any]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", self.upload_folder)

    def create_repo(self, repository: str, **options: Any) -> str:
        if self.error is not None:
            raise self.error
        return f"https://huggingface.co/{repository}"

    def upload_folder(self, **options: Any) -> None:
        self.uploads.append(options)


def test_only_the_export_is_uploaded(tmp_path: Path, monkeypatch):
    hub = Hub(monkeypatch)
    (tmp_path / "diary.txt").write_text("private")
    lines = write(decided_model(), tmp_path, Options(push="me/tiny"))
    assert lines[-1] == "https://huggingface.co/me/tiny"
    (upload,) = hub.uploads
    assert upload["repo_id"] == "me/tiny" and upload["folder_path"] == tmp_path
    assert sorted([*upload["allow_patterns"], "diary.txt"]) == sorted(
        path.name for path in tmp_path.iterdir()
    )
    assert 'from_pretrained("me/tiny"' in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("me/tiny", None, "needs a token of huggingface.co"),
        ("tiny", "secret", "must be USER/NAME"),
        ("me/a b", "secret", "--push me/a b: HFValidationError"),
    ],
)
def test_an_upload_that_cannot_work_writes_nothing(
    tmp_path: Path, monkeypatch, name: str, token: str | None, message: str
):
    Hub(monkeypatch, token)
    with pytest.raises(MemtrainError, match=message):
        write(decided_model(), tmp_path / "out", Options(push=name))
    assert not (tmp_path / "out").exists()


def test_a_failed_upload_is_one_line_and_keeps_the_folder(tmp_path: Path, monkeypatch):
    Hub(monkeypatch).error = ConnectionError("no route\nto host")
    with pytest.raises(MemtrainError) as caught:
        write(decided_model(), tmp_path / "out", Options(push="me/tiny"))
    assert str(caught.value).startswith("--push me/tiny: ConnectionError: no route; ")
    assert (tmp_path / "out/config.json").exists()


def test_push_needs_a_folder(capsys):
    assert "--hf" in refused(capsys, "export", "mnist-small", "--push", "me/tiny")


def test_transformers_own_upload_takes_the_code_along(tmp_path: Path, monkeypatch):
    """`model.push_to_hub`, up to what it hands to the upload."""
    model: Any = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "out", decided_model()))
    uploads: list[set[str]] = []

    def create_commit(hub: object, operations: list[Any], **options: Any) -> None:
        uploads.append({operation.path_in_repo for operation in operations})

    address = SimpleNamespace(repo_id="me/tiny")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: address)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    card = huggingface_hub.ModelCard("---\nlibrary_name: transformers\n---\n")
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", lambda *_, **__: card)
    model.push_to_hub("me/tiny")
    assert {"config.json", "model.safetensors", "modeling_memtrain.py"} <= uploads[0]


def test_a_missing_package_is_one_line(tmp_path: Path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from memtrain.cli import main\n"
        f"sys.exit(main(['export', 'mnist-small', '--hf', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        'memtrain: --hf: needs the transformers package: pip install "memtrain[hf]"\n'
    )
