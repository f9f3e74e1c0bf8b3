"""A GRU and an LSTM unrolled layer by layer: the loop's memories and gradients, in fp64."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from conftest import assert_unrolls_as_the_loop, plain_loop
from memtrain.accel import gated_unroll
from memtrain.accel.engine import Engine
from memtrain.accel.fast_paths import RNNLoops
from memtrain.accel.gated_unroll import UnrolledGRU, UnrolledLSTM
from memtrain.config import CellConfig, EngineConfig, TeacherConfig
from memtrain.errors import MemtrainError
from memtrain.models.cells import GRUCell, LSTMCell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder
from memtrain.shapes import Values

every_depth = pytest.mark.parametrize("layers", [1, 3])


def random_gru(layers: int) -> GRUCell:
    cell = GRUCell(CellConfig(kind="gru", memory_tokens=layers, memory_dim=6), 5)
    return cell.double()


def random_gru_start(cell: GRUCell) -> tuple[Tensor, Tensor]:
    memory = torch.randn(4, cell.memory_tokens, cell.memory_dim, dtype=torch.float64)
    return torch.randint(5, (4, 7)), memory


@every_depth
def test_gru_memories_and_gradients_equal_the_loop(layers):
    cell = random_gru(layers)
    assert_unrolls_as_the_loop(UnrolledGRU(), cell, *random_gru_start(cell))


@every_depth
def test_gru_memories_without_gradients_equal_the_loop(layers):
    cell = random_gru(layers)
    inputs, memory = random_gru_start(cell)
    with torch.no_grad():
        found = UnrolledGRU()(cell, inputs, memory)
        assert_close(found, plain_loop(cell, inputs, memory), rtol=1e-9, atol=1e-9)


# ---- LSTM


DEVICES = [
    "cpu",
    "fused",  # the branch for a GPU, with kernels of the CPU in place of torch's
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
LSTM_SHAPES = {"L1-B4-T7": (1, 4, 7), "L2-B3-T5": (2, 3, 5), "L3-B1-T1": (3, 1, 1)}
every_lstm_shape = pytest.mark.parametrize("shape", LSTM_SHAPES.values(), ids=LSTM_SHAPES)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where an LSTM is unrolled."""
    if request.param != "fused":
        yield request.param
        return
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("aten", "IMPL") as cpu,
    ):
        patch.setattr(gated_unroll, "_has_fused_cell", lambda state: True)
        cpu.impl("_thnn_fused_lstm_cell", fused_cell, "CPU")
        cpu.impl("_thnn_fused_lstm_cell_backward_impl", fused_cell_backward, "CPU")
        yield "cpu"


def fused_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's CUDA kernel computes; its workspace is the four gates."""
    assert input_bias is None and hidden_bias is None
    assert all(x.is_contiguous() and x.dim() == 2 for x in (input_gates, hidden_gates, cx))
    i, f, g, o = (input_gates + hidden_gates).chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * cx + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], dim=1)


def fused_cell_backward(
    grad_hy: Tensor, grad_cy: Tensor, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the gates before their nonlinearities, and of `cx`."""
    assert not has_bias
    assert all(x.is_contiguous() for x in (grad_hy, grad_cy, cx, cy, workspace))
    i, f, g, o = workspace.chunk(4, dim=1)
    of_c = grad_cy + grad_hy * o * (1 - cy.tanh() ** 2)
    of_i, of_f = of_c * g * i * (1 - i), of_c * cx * f * (1 - f)
    of_g, of_o = of_c * i * (1 - g**2), grad_hy * cy.tanh() * o * (1 - o)
    return torch.cat([of_i, of_f, of_g, of_o], dim=1), of_c * f, None


def random_lstm(layers: int) -> LSTMCell:
    cell = LSTMCell(CellConfig(kind="lstm", memory_tokens=2 * layers, memory_dim=6), 5)
    return cell.double()


def random_lstm_start(shape: tuple[int, int, int]) -> tuple[LSTMCell, Tensor, Tensor]:
    layers, rows, steps = shape
    memory = torch.randn(rows, 2 * layers, 6, dtype=torch.float64)
    return random_lstm(layers), torch.randint(5, (rows, steps)), memory


def assert_lstm_equals_the_loop(
    device: str,
    shape: tuple[int, int, int],
    mask: Callable[[Tensor], None] = lambda direction: None,
) -> None:
    """Memories and gradients; `mask` sets to zero where none arrives."""
    cell, inputs, memory = random_lstm_start(shape)
    mask(direction := torch.randn(*inputs.shape, *memory.shape[1:], dtype=torch.float64))
    moved, start = copy.deepcopy(cell).to(device), (inputs.to(device), memory.to(device))
    found = memories_and_gradients(UnrolledLSTM(), moved, *start, direction.to(device))
    expected = memories_and_gradients(plain_loop, cell, inputs, memory, direction)
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


def memories_and_gradients(
    unroll: Callable[[nn.Module, Tensor, Tensor], Tensor],
    cell: nn.Module,
    inputs: Tensor,
    memory: Tensor,
    direction: Tensor,
) -> list[Tensor]:
    memory = memory.clone().requires_grad_()
    memories, wanted = unroll(cell, inputs, memory), [memory, *cell.parameters()]
    gradients = torch.autograd.grad((memories * direction).sum(), wanted)
    return [found.detach().cpu() for found in (memories, *gradients)]


@every_lstm_shape
def test_lstm_memories_and_gradients_equal_the_loop(device, shape):
    assert_lstm_equals_the_loop(device, shape)


@pytest.mark.parametrize("only", ["every c", "the last c", "one c of the first layer"])
def test_gradients_that_arrive_only_at_c_equal_the_loops(device, only):
    def mask(direction: Tensor) -> None:  # (B, T, M, D)
        direction[:, :, ::2] = 0
        if only == "the last c":
            direction[:, :-1] = 0
        elif only == "one c of the first layer":
            direction[:, 3:] = direction[:, :2] = direction[:, :, 2:] = 0

    assert_lstm_equals_the_loop(device, LSTM_SHAPES["L2-B3-T5"], mask)


@every_lstm_shape
def test_lstm_memories_without_gradients_equal_the_loop(device, shape):
    cell, inputs, memory = random_lstm_start(shape)
    with torch.no_grad():
        expected = plain_loop(cell, inputs, memory)
        found = UnrolledLSTM()(cell.to(device), inputs.to(device), memory.to(device))
    assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9)
    assert not found.requires_grad


def test_an_lstm_of_numbers_equals_the_loop(device):
    config = CellConfig(kind="lstm", memory_tokens=4, memory_dim=6)
    cell, memory = LSTMCell(config, Values(features=3)).double(), torch.randn(2, 4, 6).double()
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    inputs[0, 1] = torch.nan  # missing
    expected = plain_loop(cell, inputs, memory)
    found = UnrolledLSTM()(cell.to(device), inputs.to(device), memory.to(device))
    assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9)


def test_frozen_weights_get_no_gradient_and_the_rest_gets_the_same(device):
    cell, inputs, memory = random_lstm_start(LSTM_SHAPES["L2-B3-T5"])
    cell.layers.requires_grad_(False)
    moved = copy.deepcopy(cell).to(device)
    plain_loop(cell, inputs, memory).square().sum().backward()
    UnrolledLSTM()(moved, inputs.to(device), memory.to(device)).square().sum().backward()
    found, expected = moved.embedding.weight.grad, cell.embedding.weight.grad
    assert found is not None
    assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9)
    assert all(parameter.grad is None for parameter in moved.layers.parameters())


def test_second_derivatives_are_refused(device):
    cell, inputs, memory = random_lstm_start(LSTM_SHAPES["L1-B4-T7"])
    memories = UnrolledLSTM()(cell.to(device), inputs.to(device), memory.to(device))
    with pytest.raises(MemtrainError, match="no second derivatives"):
        torch.autograd.grad(memories.square().sum(), cell.embedding.weight, create_graph=True)


def test_fp32_stays_fp32(device):
    cell, inputs, memory = random_lstm_start(LSTM_SHAPES["L2-B3-T5"])
    cell, memory = cell.float(), memory.float()
    expected = plain_loop(cell, inputs, memory)
    found = UnrolledLSTM()(cell.to(device), inputs.to(device), memory.to(device))
    assert found.dtype == torch.float32
    rounded = 1e-2 if found.is_cuda else 1e-5  # an engine may have set TF32 for the process
    assert_close(found.cpu(), expected, rtol=rounded, atol=rounded)


def test_autocast_rounds_neither_an_lstms_states_nor_its_gradients(device):
    cell, inputs, memory = random_lstm_start(LSTM_SHAPES["L2-B3-T5"])
    cell, inputs, memory = cell.float().to(device), inputs.to(device), memory.float().to(device)
    found = []
    for bf16 in (False, True):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
            memories = UnrolledLSTM()(cell, inputs, memory)
        gradients = torch.autograd.grad(memories.square().sum(), list(cell.parameters()))
        found.append([memories.detach(), *gradients])
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


# ---- both


def test_autocast_does_not_round_the_state_of_a_gru():
    cell = random_gru(2).float()
    inputs, memory = random_gru_start(cell)
    expected = plain_loop(cell, inputs, memory.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(plain_loop(cell, inputs, memory.float()), expected, rtol=0, atol=0)
        assert_close(UnrolledGRU()(cell, inputs, memory.float()), expected, rtol=1e-5, atol=1e-6)
        assert cell(memory.bfloat16(), inputs[:, 0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("ours", "unroller"),
    [(GRUCell, UnrolledGRU), (LSTMCell, UnrolledLSTM)],
    ids=["gru", "lstm"],
)
def test_engine_attaches_it_to_our_cell_only(ours, unroller):
    class Doubled(ours):
        def forward(self, memory: Tensor, token: Tensor) -> Tensor:
            return 2 * super().forward(memory, token)

    config = CellConfig(memory_tokens=2, memory_dim=6)
    decoder = TeacherConfig(width=8, decoder_layers=1, heads=2, head_dim=4)
    engine = Engine(EngineConfig(device="cpu"))
    inputs = torch.randint(5, (3, 4))
    for kind in (ours, Doubled):
        rnn = RNN(kind(config, 5), Decoder(decoder, 5, 6))
        engine.prepare(rnn)
        assert isinstance(rnn.fast, RNNLoops) == (kind is ours)
        if isinstance(rnn.fast, RNNLoops):
            assert type(found := rnn.fast.unroller) is unroller and found is not None
            assert found.serves(rnn.cell, rnn.empty_memory(3))
        assert not unroller().serves(Doubled(config, 5), rnn.empty_memory(3))
        expected = plain_loop(rnn.cell, inputs, rnn.empty_memory(3))
        assert_close(rnn.unroll(inputs), expected, rtol=1e-5, atol=1e-6)
        assert_close(rnn.unroll_last(inputs, rnn.empty_memory(3)), expected[:, -1])
