"""Files of torch.export: the same numbers as the network, loaded without it."""

import json
from pathlib import Path

import pytest
import torch
from test_onnx_file import largest_difference

import memtrain
from memtrain.deploy.torch_export import torch_step, write_pt2
from memtrain.errors import MemtrainError
from model_testing import text_codec, tiny_model


@pytest.mark.parametrize("kind", ("transformer", "gru", "values"))
def test_200_steps_are_the_networks(kind: str, tmp_path: Path):
    model = tiny_model(kind)
    write_pt2(model, tmp_path / "step.pt2", None)
    step = torch_step((tmp_path / "step.pt2").read_bytes())
    for rows, steps in ((1, 8), (5, 200)):
        assert largest_difference(model, step, rows, steps) < 1e-4


def test_the_file_says_what_a_program_needs_and_names_no_path(tmp_path: Path):
    path = tmp_path / "step.pt2"
    write_pt2(tiny_model("gru", text_codec()), path, None)
    extra = {"memory_shape": "", "codec": ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra["memory_shape"]) == [2, 16]
    assert json.loads(extra["codec"])["start_token"] == 10
    assert str(Path(memtrain.__file__).parent).encode() not in path.read_bytes()


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = tiny_model("gru")
    torch.nn.init.zeros_(other.readout.head.weight)
    monkeypatch.setattr(
        "memtrain.deploy.torch_export.torch_step",
        lambda content: (
            lambda memory, token: tuple(
                one.numpy() for one in other.step(torch.from_numpy(memory), torch.from_numpy(token))
            )
        ),
    )
    with torch.no_grad(), pytest.raises(MemtrainError, match="not written"):
        write_pt2(tiny_model("gru"), tmp_path / "step.pt2", None)
    assert not list(tmp_path.iterdir())
