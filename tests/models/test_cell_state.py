"""What a checkpoint cannot hold is refused before training; what it can hold is not."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from conftest import VOCAB
from memtrain.errors import CellContractError
from memtrain.models.check_cell import check_cell


class Sound(nn.Module):
    """Keeps the contract; the cells below add a tensor or some state."""

    memory_tokens, memory_dim = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return torch.tanh(self.linear(memory + self.embedding(token)[:, None]))


def refusal(cell: object) -> str:
    with pytest.raises(CellContractError) as caught:
        check_cell(cell, VOCAB)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------ tensors


def with_buffer(tensor: Tensor, **options: bool) -> Sound:
    cell = Sound()
    cell.register_buffer("table", tensor, **options)
    return cell


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), "table is torch.complex64, which a checkpoint"),
        (torch.zeros(2, dtype=torch.uint16), "table is torch.uint16, which a checkpoint"),
        (torch.zeros(2, dtype=torch.uint64), "table is torch.uint64, which a checkpoint"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "table is torch.float8_e4m3fn, which a"),
        (torch.eye(3).to_sparse(), "table is sparse (torch.sparse_coo)"),
        (torch.ones(3, 1).expand(3, 4), "table is expanded"),
        (torch.ones(6).as_strided((3, 3), (1, 1)), "table is expanded"),
        (torch.zeros(2, device="meta"), "table is on the meta device"),
    ],
    ids=["complex", "uint16", "uint64", "float8", "sparse", "expanded", "overlapping", "meta"],
)
def test_a_buffer_that_a_checkpoint_cannot_hold_is_refused(tensor, message):
    assert refusal(with_buffer(tensor)).startswith(f"Sound: {message}")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(0, 3),
        torch.tensor(1),
        torch.ones(4, 3).T,
        torch.ones(4, 6)[:, ::2],
        torch.zeros(2, dtype=torch.bfloat16),
    ],
    ids=["bool", "empty", "scalar", "transposed", "gaps", "bfloat16"],
)
def test_a_buffer_that_a_checkpoint_can_hold_is_accepted(tensor):
    check_cell(with_buffer(tensor), VOCAB)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.ones(3, 1).expand(3, 4)],
    ids=["complex", "sparse", "expanded"],
)
def test_a_constant_that_is_not_saved_may_be_anything(tensor):
    check_cell(with_buffer(tensor, persistent=False), VOCAB)


class ComplexParameter(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return super().forward((memory * self.turn).real, token)


class Uninitialised(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.later = nn.UninitializedParameter()


class WithGaps(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])


class TwoInOneMemory(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.again.weight = nn.Parameter(self.linear.weight.data)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return self.again(super().forward(memory, token))


class ViewOfAParameter(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.linear.weight.data[0])


class ExtraState(Sound):
    state: object = {"calls": 3}

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


class ExtraTensor(ExtraState):
    state = torch.tensor(3)


class SparseGradient(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 4, sparse=True)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (ComplexParameter, "turn is torch.complex64, which a checkpoint cannot hold"),
        (Uninitialised, "later has no size yet"),
        (WithGaps, "parameter linear.weight is a slice with gaps in memory"),
        (TwoInOneMemory, "again.weight and linear.weight are two tensors in one memory"),
        (ViewOfAParameter, "are two tensors in one memory"),
        (ExtraState, "state_dict() holds _extra_state of type dict"),
        (SparseGradient, "the gradient of ['embedding.weight'] is sparse"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_cannot_be_trained_or_restored_is_refused(cell, expected):
    message = refusal(cell())
    assert message.startswith(f"{cell.__name__}: ") and expected in message


# ----------------------------------------------------------------------- state outside of them


class Noisy(Sound):
    """Adds noise in training; where it comes from, the cells below say."""

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        out = super().forward(memory, token)
        return out + 0.1 * self.noise() if self.training else out

    def noise(self) -> float | Tensor:
        return torch.rand(())


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)

    def noise(self) -> Tensor:
        return torch.rand((), generator=self.rng)


class OfNumpy(Noisy):
    def noise(self) -> float:
        return float(np.random.rand())


class OfPython(Noisy):
    def noise(self) -> float:
        return random.random()


class OfAGlobal(Noisy):
    def noise(self) -> float:
        CALLS.append(1)
        return len(CALLS)


CALLS: list[int] = []


class Counter(Noisy):
    calls = 0

    def noise(self) -> float:
        self.calls += 1
        return self.calls


class RareCounter(Counter):
    """Its noise begins long after the check."""

    def noise(self) -> float:
        return float(super().noise() > 1000)


class NotPersistent(Noisy):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def noise(self) -> Tensor:
        self.count += 1
        return self.count.clone()


class FirstCall(Noisy):
    """Fits its scale to the first memory it sees; whether it has, is not saved."""

    ready = False
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def noise(self) -> Tensor:
        if not self.ready:
            self.scale = self.linear.weight.detach().std()
            self.ready = True
        return self.scale


class AverageWeights(Noisy):
    """An average of weights in an attribute, which is a tensor but not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(4, 4)

    def noise(self) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * self.linear.weight.detach()
        return self.average.mean()


class NotInTheStateDict(Sound):
    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "bias" not in name}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict=False)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (OwnGenerator, "(rng, a generator of its own)"),
        (OfNumpy, "(own generator, counter, numpy)"),
        (OfPython, "two training steps from the same saved state differ"),
        (OfAGlobal, "two training steps from the same saved state differ"),
        (Counter, "attribute calls changes with every training step"),
        (RareCounter, "attribute calls changes with every training step"),
        (NotPersistent, "buffer count changes with every training step, but persistent=False"),
        (FirstCall, "two training steps from the same saved state differ"),
        (AverageWeights, "two training steps from the same saved state differ"),
        (NotInTheStateDict, "two training steps from the same saved state differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_is_not_saved_is_refused(cell, expected):
    message = refusal(cell())
    assert message.startswith(f"{cell.__name__}: ") and expected in message
    assert "a resumed run would differ" in message


class Unloadable(Sound):
    def load_state_dict(self, *args, **kwargs):
        raise KeyError("weights of another kind")


class TupleInTraining(Sound):
    def forward(self, memory: Tensor, token: Tensor):
        out = super().forward(memory, token)
        return (out, 0.0) if self.training else out


class RaisesInTrain(Sound):
    def train(self, mode: bool = True):
        raise LookupError("no such mode")


class KeepsAGraph(Sound):
    kept: Tensor | None = None

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.linear.weight.exp().sum()
        return super().forward(memory, token) * self.kept


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            Unloadable,
            "its own state_dict() cannot be loaded again; load_state_dict raised KeyError",
        ),
        (RaisesInTrain, "RaisesInTrain: checking it raised LookupError: no such mode"),
        (TupleInTraining, "forward must return one floating-point tensor, not tuple"),
        (KeepsAGraph, "the backward pass of a step raised RuntimeError: Trying to backward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cell_that_fails_on_a_later_call_is_refused_with_a_reason(cell, message):
    assert message in refusal(cell())


# --------------------------------------------------------------------------------- what passes


class CountsInABuffer(Noisy):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def noise(self) -> Tensor:
        self.count += 1
        return 1 / self.count


class Remembers(Noisy):
    """Keeps the last memory for a figure, a cache, and a hook."""

    cache: Tensor | None = None
    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.linear.register_forward_hook(lambda *_: self.seen.append(1))

    def noise(self) -> Tensor:
        if self.cache is None:
            self.cache = torch.ones(())
        self.last = torch.rand(())
        return self.cache


class Tied(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.again.weight = self.linear.weight
        self.again.bias.requires_grad_(False)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return self.again(super().forward(memory, token))


class Conv(Sound):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(2, 2, 3, 3).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)
        self.turned = nn.Parameter(torch.randn(4, 4).T)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        out = super().forward(memory @ self.turned, token).view(-1, 2, 2, 2)
        return nn.functional.conv2d(out, self.weight, padding=1).reshape(memory.shape)


class Normed(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(weight_norm(nn.Linear(4, 4)), spectral_norm(nn.Linear(4, 4)))  # type: ignore[assignment]


class InDouble(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return self.linear((memory + self.embedding(token)[:, None]).double()).float()


@pytest.mark.parametrize(
    "cell",
    [Noisy, CountsInABuffer, Remembers, Tied, Conv, Normed, InDouble, ExtraTensor],
    ids=lambda cell: cell.__name__,
)
def test_saved_or_irrelevant_state_is_accepted(cell):
    checked = cell()
    assert check_cell(checked, VOCAB) is checked


@pytest.mark.parametrize("made", [CountsInABuffer, Remembers, Counter, OfNumpy, FirstCall])
def test_the_check_restores_the_cell_and_every_rng(made):
    cell = made().train()
    cell.linear.eval()  # a part that stays in eval mode
    handle = cell.linear.register_forward_hook(lambda *_: None)
    tensors = {name: value.clone() for name, value in cell.state_dict().items()}
    plain = {name: repr(value) for name, value in vars(cell).items()}
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    try:
        check_cell(cell, VOCAB)
    except CellContractError:
        assert made in (Counter, OfNumpy, FirstCall)
    assert cell.training and not cell.linear.training
    assert {name: repr(value) for name, value in vars(cell).items()} == plain
    for name, value in cell.state_dict().items():
        assert torch.equal(value, tensors[name]), name
    assert all(parameter.grad is None for parameter in cell.parameters())
    assert random.getstate() == states[0] and repr(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    handle.remove()
    assert len(cell.linear._forward_hooks) == (made is Remembers)
