"""Files with 8-bit matrices: a quarter of the size, the rounded numbers, a measured cost."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_onnx_file import Options, exported, largest_difference

from memtrain.config import Custom, Retrieval, Stream
from memtrain.deploy import int8
from memtrain.deploy.int8 import LossCost, loss_cost, to_int8
from memtrain.deploy.onnx_file import onnx_step, write_onnx
from memtrain.deploy.step import RunStep
from memtrain.errors import MemtrainError
from memtrain.generation.pretrained import Pretrained
from memtrain.losses import decode_loss
from model_testing import tiny_model

KINDS = ("transformer", "gru", "values")


def rounded(model: Pretrained, smallest: int) -> Pretrained:
    """A copy of a model whose large matrices are rounded to 127 steps per row, by hand."""
    copy = tiny_model("values" if model.vocab_size == 0 else model.config.cell.kind)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() == 2 and parameter.numel() >= smallest:
                scale = parameter.abs().amax(dim=1, keepdim=True) / 127
                parameter.copy_((parameter / scale).round() * scale)
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_network_with_rounded_matrices(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(int8, "SMALLEST", 32)
    model, proto = exported(kind)
    step = onnx_step(to_int8(proto).SerializeToString())
    assert largest_difference(rounded(model, 32), step, rows=2, steps=50) < 1e-4
    assert largest_difference(model, step, rows=2, steps=50) > 1e-4


def test_matrices_take_a_byte_per_number_and_the_plain_file_is_unchanged():
    _, proto = exported("transformer")
    before = proto.SerializeToString()
    made = to_int8(proto)
    assert proto.SerializeToString() == before
    sizes = {one.name: math.prod(one.dims) for one in proto.graph.initializer}
    kinds = [(math.prod(one.dims), one.data_type) for one in made.graph.initializer]
    large = [kind for size, kind in kinds if size >= int8.SMALLEST]
    assert large and set(large) == {3}  # int8
    stored = sum(size for size, kind in kinds if kind == 3)
    assert stored == sum(size for size in sizes.values() if size >= int8.SMALLEST)
    assert [(one.key, one.value) for one in made.metadata_props][-1] == ("weights", "int8")


def held_out_loss(model: Pretrained, count: int) -> float:
    task = int8.build_task(model.config.data)
    generator = torch.Generator().manual_seed(int8.EVALUATION_SEED)
    batch = task.held_out(count, generator)
    with torch.no_grad():
        return float(decode_loss(model(batch.inputs), batch.targets))


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Pretrained:
    """A model of a task whose held-out data is made on the spot."""
    monkeypatch.setattr(int8, "TOKENS", 6 * 40)
    model, _ = exported("gru")
    data = Retrieval(sequence_length=6, vocab_size=7)
    found = Pretrained("tiny", model, None, replace(model.config, data=data), {})
    assert int8.build_task(data).space == found.space
    return found


def plain_step(model: Pretrained) -> RunStep:
    def step(memory: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, new = model.step(torch.from_numpy(memory), torch.from_numpy(token))
        return logits.numpy(), new.numpy()

    return step


def test_the_cost_is_the_difference_of_the_losses(answering: Pretrained):
    other = rounded(answering, 32)
    other.config = answering.config
    cost = loss_cost(answering, plain_step(answering), plain_step(other))
    assert cost.inputs == 240 and cost.error > 0
    assert cost.loss == pytest.approx(held_out_loss(answering, 40), abs=1e-5)
    assert cost.loss + cost.change == pytest.approx(held_out_loss(other, 40), abs=1e-5)


def test_a_cost_is_one_readable_line():
    line = str(LossCost(0.5, 0.001, 0.0002, 1234, "token", "data/x"))
    assert line == (
        "8 bits change the loss per token from 0.5000 to 0.5010 (+0.0010, standard error 0.0002) "
        "on 1,234 held-out inputs of data/x"
    )


def test_without_its_data_the_cost_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, proto = exported("gru")
    monkeypatch.setattr("memtrain.deploy.onnx_file.make_onnx", lambda model: proto)
    model.config = replace(model.config, data=Stream(path=str(tmp_path / "gone")))
    lines = write_onnx(model, tmp_path / "x.onnx", Options(int8=True))
    assert "was not measured" in lines[-1] and "gone" in lines[-1]
    assert (tmp_path / "x.onnx").is_file()


def test_a_users_task_is_imported_only_if_allowed():
    model, _ = exported("gru")
    config = replace(model.config, data=Custom(path="nowhere:Task"))
    model = Pretrained("tiny", model, None, config, {})
    with pytest.raises(MemtrainError, match="your own class, nowhere:Task; --allow-code"):
        loss_cost(model, plain_step(model), plain_step(model))


def test_data_of_another_kind_is_not_scored(answering: Pretrained):
    answering.config = replace(answering.config, data=Retrieval(sequence_length=6, vocab_size=4))
    with pytest.raises(MemtrainError, match="of another kind"):
        loss_cost(answering, plain_step(answering), plain_step(answering))
