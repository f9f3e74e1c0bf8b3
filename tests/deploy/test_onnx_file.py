"""ONNX files: the same numbers as the network, for any batch, and readable without memtrain."""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memtrain
from memtrain.deploy.onnx_file import make_onnx, onnx_step, write_onnx
from memtrain.deploy.step import CHECKED_STEPS, RunStep
from memtrain.errors import MemtrainError
from memtrain.generation.pretrained import Pretrained
from memtrain.models.check_cell import sample_token
from model_testing import SIZES, VALUES, text_codec, tiny_model

KINDS = ("transformer", "mlp", "gru", "lstm", "attention", "torch", "values")


@dataclass(frozen=True)
class Options:
    int8: bool = False
    allow_code: bool = False


def largest_difference(model: Pretrained, step: RunStep, rows: int, steps: int) -> float:
    """Of logits and memories, with the same random tokens, each following its own memory."""
    generator = torch.Generator().manual_seed(rows)
    expected = model.empty_memory(rows)
    memory, largest = expected.numpy(), 0.0
    for _ in range(steps):
        token = sample_token(model.space, rows, generator)
        if token.is_floating_point():
            token[0, 0] = torch.nan  # a missing number
        with torch.no_grad():
            logits, expected = model.step(expected, token)
        found, memory = step(memory, token.numpy())
        for one, other in ((logits, found), (expected, memory)):
            largest = max(largest, float((one - torch.from_numpy(other)).abs().max()))
    return largest


@cache
def exported(kind: str) -> tuple[Pretrained, Any]:
    """A model and its ONNX form, which takes seconds to make."""
    model = tiny_model(kind)
    return model, make_onnx(model)


@pytest.mark.parametrize("kind", KINDS)
def test_200_steps_are_the_networks(kind: str):
    model, proto = exported(kind)
    step = onnx_step(proto.SerializeToString())
    for rows, steps in ((1, 8), (2, 8), (5, 200)):
        assert largest_difference(model, step, rows, steps) < 1e-4


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "new" / "text.onnx"
    lines = write_onnx(tiny_model("gru", text_codec()), path, Options())
    assert str(path) in lines[0] and f"over {CHECKED_STEPS} steps" in lines[1]
    return path


def test_the_file_says_what_a_program_needs(text_file: Path):
    import onnx

    proto = onnx.load(text_file)
    found = {one.key: one.value for one in proto.metadata_props}
    codec = json.loads(found["codec"])
    assert json.loads(found["memory_shape"]) == [2, 16]
    assert json.loads(found["vocab_size"]) == codec["vocab_size"] == 128
    assert json.loads(found["start_token"]) == 10 and bytes(codec["alphabet"]) == b"\n abc"
    inputs = [(one.name, one.type.tensor_type.shape.dim[0].dim_param) for one in proto.graph.input]
    assert inputs == [("memory", "batch"), ("token", "batch")]
    assert [one.name for one in proto.graph.output] == ["logits", "next_memory"]
    assert proto.opset_import[0].version >= 20


def test_the_file_names_no_path_of_this_machine(text_file: Path):
    content = text_file.read_bytes()
    assert str(Path(memtrain.__file__).parent).encode() not in content
    assert b".py" not in content


def test_a_program_without_torch_runs_it(text_file: Path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['memtrain'] = None\n"
        "import json, numpy as np, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(text_file)!r})\n"
        "meta = session.get_modelmeta().custom_metadata_map\n"
        "memory = np.zeros([1, *json.loads(meta['memory_shape'])], np.float32)\n"
        "token = np.array([json.loads(meta['start_token'])])\n"
        "for _ in range(5):\n"
        "    logits, memory = session.run(None, {'memory': memory, 'token': token})\n"
        "    token = logits.argmax(1)\n"
        "    print(token[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = tiny_model("gru", text_codec())
    tokens = memtrain.generate(model, length=5, temperature=0.0).tokens[0, 1:]
    assert [int(line) for line in done.stdout.split()] == tokens.tolist()


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def other(content: bytes) -> RunStep:
        right = onnx_step(content)

        def step(memory: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            logits, memory = right(memory, token)
            return logits, memory + np.float32(1e-3)

        return step

    monkeypatch.setattr("memtrain.deploy.onnx_file.onnx_step", other)
    model, proto = exported("gru")
    monkeypatch.setattr("memtrain.deploy.onnx_file.make_onnx", lambda model: proto)
    path = tmp_path / "gru.onnx"
    path.write_bytes(b"old")
    with pytest.raises(MemtrainError, match="not written: after 1 steps its numbers differ"):
        write_onnx(model, path, Options())
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_network_that_gives_nan_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, (_, proto) = tiny_model("gru"), exported("gru")
    monkeypatch.setattr("memtrain.deploy.onnx_file.make_onnx", lambda model: proto)
    nn.init.constant_(model.readout.head.weight, torch.nan)
    with pytest.raises(MemtrainError, match="differ from the network's by nan"):
        write_onnx(model, tmp_path / "x.onnx", Options())
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MemtrainError, match=r'--onnx: needs .*pip install "memtrain\[onnx\]"'):
        write_onnx(tiny_model("gru"), tmp_path / "x.onnx", Options())


class Branching(nn.Module):
    """A cell whose step branches on a value, which has no graph."""

    memory_tokens, memory_dim = 1, 16

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.mix = nn.Linear(32, 16)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        x = torch.cat([memory[:, 0], self.embedding(token)], dim=1)
        if x.sum().item() > 1e9:
            x = x * 2
        return self.mix(x).tanh()[:, None]


def test_a_cell_that_cannot_be_traced_is_one_line(tmp_path: Path):
    cell = Branching(7)
    model = tiny_model("torch")
    model.cell = cell
    model.readout = memtrain.RNN(cell, vocab_size=7, decoder_layers=1, **SIZES).readout
    with pytest.raises(MemtrainError, match="cannot trace its cell, Branching") as error:
        write_onnx(model, tmp_path / "x.onnx", Options())
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_network_of_numbers_names_them():
    _, proto = exported("values")
    found = {one.key: one.value for one in proto.metadata_props}
    assert json.loads(found["values"])["features"] == VALUES.features
    assert "vocab_size" not in found
