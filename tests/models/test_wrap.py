"""Recurrent cells of torch and of other packages as cells of memtrain."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import memtrain
from conftest import TINY, VOCAB, plain_loop, random_tokens
from memtrain.config import CellConfig, Digits
from memtrain.errors import CellContractError, MemtrainError
from memtrain.models.cells import build_cell
from memtrain.models.check_cell import check_cell, memory_shape
from memtrain.models.wrap import WrappedCell, wrap
from memtrain.training.run import Interrupted
from run_testing import StopAt, assert_same_weights

LAYERS: dict[Any, Any] = {
    nn.RNNCell: nn.RNN,
    nn.GRUCell: nn.GRU,
    nn.LSTMCell: nn.LSTM,
}


def wrapped(cell: nn.Module, **options: Any) -> WrappedCell:
    """A wrapped cell that keeps the contract."""
    found = wrap(cell, VOCAB, **options)
    assert check_cell(found, VOCAB) is found
    return found


# --------------------------------------------------------------------------------- torch's cells


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_memories_and_gradients_are_those_of_torchs_layer(kind: Any):
    torch.manual_seed(0)
    cell = wrapped(kind(6, 8)).double()
    layer = LAYERS[kind](6, 8, batch_first=True).double()
    layer.load_state_dict({f"{key}_l0": value for key, value in cell.cell.state_dict().items()})
    tokens = random_tokens(3, 5)
    memories = plain_loop(cell, tokens, torch.zeros(3, *memory_shape(cell), dtype=torch.double))
    outputs, last = layer(cell.embedding(tokens))
    assert_close(memories[:, :, 0], outputs)
    states = last if isinstance(last, tuple) else (last,)
    assert memory_shape(cell) == (len(states), 8)
    assert_close(memories[:, -1], torch.cat(states).transpose(0, 1))
    direction = torch.randn_like(outputs)
    found = torch.autograd.grad((memories[:, :, 0] * direction).sum(), list(cell.cell.parameters()))
    expected = torch.autograd.grad((outputs * direction).sum(), list(layer.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_autocast_does_not_round_the_states(kind: Any):
    cell, token = wrapped(kind(8, 8)), random_tokens(4)
    memory = torch.randn(4, *memory_shape(cell))
    with torch.autocast("cpu", torch.bfloat16):
        found = cell(memory, token)
    assert torch.equal(found, cell(memory, token))


def test_the_embedding_can_be_replaced_to_read_numbers():
    cell = wrap(nn.GRUCell(6, 8), VOCAB)
    cell.embedding = nn.Linear(3, 6)
    x, memory = torch.randn(4, 3), torch.randn(4, 1, 8)
    expected = cell.cell(cell.embedding(x), memory[:, 0])
    assert_close(WrappedCell.forward.__wrapped__(cell, memory, x)[:, 0], expected)  # type: ignore


def test_wrapping_leaves_mode_weights_and_random_numbers_alone():
    cell = nn.LSTMCell(4, 4).eval()
    before = {key: value.clone() for key, value in cell.state_dict().items()}
    torch.manual_seed(3)
    nn.Embedding(VOCAB, 4)  # draws as many numbers as wrap's own embedding
    expected = torch.rand(2)
    torch.manual_seed(3)
    wrap(cell, VOCAB)
    assert torch.equal(torch.rand(2), expected)
    assert not cell.training
    assert all(torch.equal(value, before[key]) for key, value in cell.state_dict().items())


# ----------------------------------------------------------------------------------- other forms


class Base(nn.Module):
    """A cell of input size 6 with states of width 8."""

    input_size, hidden_size = 6, 8

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(14, 8)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, h], dim=1)))


class StateFirst(Base):
    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        return self.step(x, state)


class StatesAsArguments(Base):
    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(x, h), c + h


class ListOfStates(Base):
    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> Any:
        if states is None:
            states = [torch.zeros(len(x), 8), torch.zeros(len(x), 8)]
        new = [self.step(x, states[0]), states[1] + states[0]]
        return new[0], new


class OutputFirst(Base):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, h: Tensor, ts: float) -> tuple[Tensor, Tensor]:
        new = h + ts * self.step(x, h)
        return self.out(new), new


class TwoWidths(Base):
    def __init__(self, other: int = 16) -> None:
        super().__init__()
        self.other = other
        self.more = nn.Linear(8, other)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None = None) -> Any:
        if states is None:
            states = (torch.zeros(len(x), 8), torch.zeros(len(x), self.other))
        h = self.step(x, states[0])
        return h, states[1] + self.more(h)


@pytest.mark.parametrize(
    ("cell", "shape", "passed"),
    [
        (StateFirst(), (1, 8), "tensor"),
        (StatesAsArguments(), (2, 8), "arguments"),
        (ListOfStates(), (2, 8), "list"),
        (OutputFirst(), (1, 8), "tensor"),
        (TwoWidths(), (3, 8), "tuple"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_form_of_a_call_is_found(cell: nn.Module, shape: tuple[int, int], passed: str):
    found = wrapped(cell)
    assert memory_shape(found) == shape
    assert f"passed='{passed}', state_first={isinstance(cell, StateFirst)}" in repr(found)


def test_states_of_several_widths_are_packed_one_after_another():
    cell, token = wrapped(inner := TwoWidths()), random_tokens(4)
    memory = torch.randn(4, 3, 8)
    h, wide = inner(cell.embedding(token), (memory[:, 0], memory[:, 1:].flatten(1)))
    assert_close(cell(memory, token), torch.cat([h, wide], dim=1).unflatten(1, (3, 8)))


def test_parameters_that_make_only_the_output_are_frozen():
    cell = wrapped(OutputFirst())
    frozen = [name for name, p in cell.named_parameters() if not p.requires_grad]
    assert frozen == ["cell.out.weight", "cell.out.bias"]


# ---------------------------------------------------------------------------------------- errors


class Unsized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(14, 8)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.mix(torch.cat([x, h], dim=1))


class Delayed(Base):
    def forward(self, x: Tensor, h: Tensor | None = None, older: Tensor | None = None) -> Tensor:
        h = torch.zeros(len(x), 8) if h is None else h
        return self.step(x, h if older is None else h + older)


class Alone(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Forgetful(Base):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.step(x, torch.zeros(len(x), 8))


class Picture(Base):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.step(x, torch.zeros(len(x), 8))[:, :, None, None]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (nn.LSTMCell, "LSTMCell: is a class; pass an instance, wrap(LSTMCell(...))"),
        (3, "int: must be a torch.nn.Module"),
        (nn.LSTM(4, 4), "LSTM: runs over whole sequences; wrap one step of it, torch.nn.LSTMCell"),
        (
            type("Mine", (nn.GRU,), {})(4, 4),
            "Mine: runs over whole sequences; wrap one step of it, torch.nn.GRUCell",
        ),
        (nn.Linear(4, 4), "Linear: forward takes 1 argument, not an input and states"),
        (Unsized(), "Unsized: has no attribute input_size or in_features; pass wrap("),
        (Alone(), "Alone: forward takes 1 argument, not an input and states"),
        (Delayed(), "returned states of shapes [(7, 8)] from states of shapes [(7, 8), (7, 8)]"),
        (Forgetful(), "Forgetful: its new states do not depend on state 1 of 1"),
        (Picture(), "Picture: no form of call fits"),
        (TwoWidths(9), "TwoWidths: its states have sizes 8, 9, which memory tokens of one width"),
        (wrap(nn.GRUCell(4, 4), VOCAB), "WrappedCell: is a cell of memtrain already"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_cells_that_cannot_be_wrapped_are_refused_with_the_reason(cell: Any, message: str):
    with pytest.raises(CellContractError) as caught:
        wrap(cell, VOCAB)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_may_be_given():
    with pytest.raises(CellContractError, match=r"sizes of its states are unknown.*state_sizes="):
        wrap(Unsized(), VOCAB, input_size=6)
    assert memory_shape(wrapped(Unsized(), input_size=6, state_sizes=(8,))) == (1, 8)
    with pytest.raises(CellContractError, match="no form of call fits"):
        wrap(Unsized(), VOCAB, input_size=5, state_sizes=(8,))


# ------------------------------------------------------------------------------ named in a config


def test_a_config_names_a_cell_and_its_arguments():
    cell = build_cell(CellConfig(kind="torch.nn:LSTMCell", memory_dim=12), VOCAB)
    assert memory_shape(cell) == (2, 12)
    options = {"hidden_size": 16, "bias": False}
    cell = build_cell(CellConfig(kind="torch.nn:GRUCell", options=options), VOCAB)
    assert memory_shape(cell) == (1, 16) and cell.cell.input_size == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "torch.nn:LSTMCell",
            {"hiden": 3},
            "unexpected keyword argument 'hiden'; cell.options sets",
        ),
        ("torch.nn:Linear", {"out_features": 3}, "Linear: forward takes 1 argument"),
        ("torch.nn:LSTM", {}, "LSTM: runs over whole sequences; wrap one step"),
        ("torch.nn:LSTMCel", {}, "no class LSTMCel, but ['LSTMCell', 'LSTM']"),
        ("memtrain.models.wrap:WrappedCell", {}, "cell=memtrain.wrap(...)"),
    ],
)
def test_a_config_with_a_cell_that_does_not_wrap_is_refused(kind, options, message):
    with pytest.raises(MemtrainError) as caught:
        build_cell(CellConfig(kind=kind, options=options), VOCAB)
    assert message in str(caught.value)


def test_a_run_of_torchs_cell_resumes_loads_and_is_exported_from_its_folder(tmp_path: Path):
    config = replace(
        TINY,
        data=Digits(),
        cell=CellConfig(kind="torch.nn:LSTMCell", options={"hidden_size": 8}),
        teacher=replace(TINY.teacher, normalize_memory=False),
    )
    whole = memtrain.Run.create(config, tmp_path / "whole").train(memtrain.Reporter())
    stopped = memtrain.Run.create(config, tmp_path / "stopped")
    stage = stopped.stages[0]
    with pytest.raises(Interrupted):
        stopped.train(StopAt(stage, 2))
    resumed = memtrain.Run.open(tmp_path / "stopped").train(memtrain.Reporter())
    assert_same_weights(resumed, whole)
    rnn = memtrain.load_rnn(tmp_path / "whole").rnn
    tokens = torch.zeros(2, 5, dtype=torch.long)
    with torch.no_grad():
        expected = whole.rnn(tokens)
        assert_close(rnn(tokens), expected)
        memtrain.export(whole, "mine", tmp_path / "out")
        exported = memtrain.load_pretrained("mine", folder=tmp_path / "out").rnn
        assert_close(exported(tokens), expected, rtol=1e-2, atol=1e-2)


def test_a_run_of_a_wrapped_object_is_opened_with_the_same_object(tmp_path: Path):
    vocab_size = memtrain.Run.create(TINY, tmp_path / "other").task.vocab_size
    run = memtrain.Run.create(TINY, tmp_path / "run", cell=wrap(nn.LSTMCell(8, 8), vocab_size))
    run.train(memtrain.Reporter())
    again = memtrain.Run.open(tmp_path / "run", cell=wrap(nn.LSTMCell(8, 8), vocab_size))
    assert_same_weights(again, run)
    with pytest.raises(MemtrainError, match="is not the cell that this run was made with"):
        memtrain.Run.open(tmp_path / "run", cell=wrap(nn.LSTMCell(8, 16), vocab_size))
    with pytest.raises(MemtrainError, match="pass the same, cell=memtrain.wrap"):
        memtrain.Run.open(tmp_path / "run", allow_code=True)


# -------------------------------------------------------------------------------- other packages

REFUSED = {"tauGRUCell": "from states of shapes"}
"""Its second argument is an older state, which it does not return."""


@pytest.mark.parametrize("kind", ["torchrecurrent:MGUCell", "ncps.torch:CfCCell"])
def test_cells_of_other_packages_are_built_by_name(kind: str):
    pytest.importorskip(kind.partition(":")[0])
    cell = build_cell(CellConfig(kind=kind, memory_dim=12), VOCAB)
    assert isinstance(cell, WrappedCell) and type(cell.cell).__name__ == kind.partition(":")[2]
    assert memory_shape(cell) == (1, 12)


def test_torchrecurrents_cells_wrap_but_for_those_that_need_older_states():
    package = pytest.importorskip("torchrecurrent")
    names = [name for name in package.__all__ if name.endswith("Cell")]
    assert len(names) > 30
    refused = {}
    for name in names:
        cell, token = getattr(package, name)(8, 8), random_tokens(4)
        try:
            found = wrapped(cell)
        except CellContractError as error:
            refused[name] = str(error)
            continue
        memory = torch.randn(4, *memory_shape(found))
        states = list(memory.unbind(1))
        new = cell(found.embedding(token), tuple(states) if len(states) > 1 else states[0])
        if isinstance(new, tuple):
            new = new[-1] if isinstance(new[-1], tuple) else new[-len(states) :]
        new = new if isinstance(new, tuple) else (new,)
        assert_close(found(memory, token), torch.stack(new, dim=1))
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in message for name, message in refused.items())


def test_ncps_cells_wrap():
    ncps = pytest.importorskip("ncps.torch")
    wirings = pytest.importorskip("ncps.wirings")
    torch.manual_seed(0)
    cell, token, memory = ncps.CfCCell(6, 8), random_tokens(4), torch.randn(4, 1, 8)
    found = wrapped(cell)
    expected, _ = cell(found.embedding(token), memory[:, 0], 1.0)
    assert_close(found(memory, token)[:, 0], expected)
    assert memory_shape(wrapped(ncps.LTCCell(wirings.AutoNCP(16, 4), 6))) == (1, 16)
    assert memory_shape(wrapped(ncps.WiredCfCCell(6, wirings.AutoNCP(16, 4)))) == (1, 16)
