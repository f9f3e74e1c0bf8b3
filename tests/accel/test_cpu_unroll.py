"""A Transformer cell unrolled as one function: the plain loop's memories and gradients, in fp64."""

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_unrolls_as_the_loop, plain_loop
from memtrain.accel.cpu_unroll import FusedUnroll
from memtrain.accel.fast_paths import loops
from memtrain.config import CellConfig, TeacherConfig
from memtrain.errors import MemtrainError
from memtrain.models.cells import TransformerCell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder

SHAPES = {
    "M1-D8-W8-L1-B5-T6": (1, 8, 8, 1, 5, 6),
    "M3-D8-W8-L1-B2-T1": (3, 8, 8, 1, 2, 1),
    "M2-D6-W8-L1-B3-T7": (2, 6, 8, 1, 3, 7),  # projections to and from the memory
    "M1-D8-W8-L2-B1-T5": (1, 8, 8, 2, 1, 5),
    "M4-D6-W8-L3-B3-T4": (4, 6, 8, 3, 3, 4),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
symbols = pytest.mark.parametrize("vocab_size", [3, 40], ids=["table", "tokens"])


def random_cell(
    shape: tuple[int, ...], vocab_size: int = 3, rotary_fraction: float = 1.0
) -> TransformerCell:
    tokens, dim, width, layers, *_ = shape
    config = CellConfig(
        memory_tokens=tokens,
        memory_dim=dim,
        width=width,
        layers=layers,
        heads=2,
        head_dim=6,
        rotary_fraction=rotary_fraction,
    )
    cell = TransformerCell(config, vocab_size).double()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for parameter in cell.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return cell


def random_start(shape: tuple[int, ...], vocab_size: int = 3) -> tuple[Tensor, Tensor]:
    tokens, dim, _, _, rows, steps = shape
    memory = torch.randn(rows, tokens, dim, dtype=torch.float64)
    return torch.randint(vocab_size, (rows, steps)), memory


@every_shape
@symbols
def test_memories_and_gradients_equal_the_loop(shape, vocab_size):
    cell = random_cell(shape, vocab_size)
    assert_unrolls_as_the_loop(FusedUnroll(), cell, *random_start(shape, vocab_size))


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 2 / 3])
def test_partly_rotated_heads_equal_the_loop(fraction):
    shape = SHAPES["M4-D6-W8-L3-B3-T4"]
    cell = random_cell(shape, rotary_fraction=fraction)
    assert_unrolls_as_the_loop(FusedUnroll(), cell, *random_start(shape))


@every_shape
def test_memories_without_gradients_equal_the_loop(shape):
    cell = random_cell(shape)
    inputs, memory = random_start(shape)
    with torch.no_grad():
        found = FusedUnroll()(cell, inputs, memory)
        torch.testing.assert_close(found, plain_loop(cell, inputs, memory), rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_refused():
    shape = SHAPES["M4-D6-W8-L3-B3-T4"]
    cell = random_cell(shape)
    memories = FusedUnroll()(cell, *random_start(shape))
    with pytest.raises(MemtrainError, match="fused unroll has no second derivatives; set rnn.fast"):
        torch.autograd.grad(memories.square().sum(), [*cell.parameters()], create_graph=True)


def test_gradients_from_the_zero_memory_are_finite():
    shape = SHAPES["M2-D6-W8-L1-B3-T7"]
    cell = random_cell(shape)
    inputs, memory = random_start(shape)
    found = FusedUnroll()(cell, inputs, torch.zeros_like(memory))
    gradients = torch.autograd.grad(found.square().sum(), list(cell.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


class TestRNN:
    shape = SHAPES["M3-D8-W8-L1-B2-T1"]

    def rnn(self, cell: nn.Module) -> RNN:
        config = TeacherConfig(width=8, decoder_layers=1, heads=2, head_dim=4)
        rnn = RNN(cell, Decoder(config, 3, 8))
        loops(rnn).unroller = FusedUnroll()
        return rnn

    def test_follow_ends_with_the_memory_of_the_loop(self):
        cell = random_cell(self.shape)
        inputs, memory = torch.randint(3, (2, 4)), random_start(self.shape)[1]
        expected = plain_loop(cell, inputs, memory)[:, -1]
        rnn = self.rnn(cell)
        torch.testing.assert_close(rnn.unroll_last(inputs, memory), expected, rtol=1e-9, atol=1e-9)
        rnn.fast = None
        assert torch.equal(rnn.unroll_last(inputs, memory), expected)

    def test_other_cells_are_not_replaced(self):
        class Doubled(TransformerCell):
            def forward(self, memory: Tensor, token: Tensor) -> Tensor:
                return 2 * super().forward(memory, token)

        config = CellConfig(memory_tokens=3, memory_dim=8, width=8, layers=1, heads=2, head_dim=6)
        cell = Doubled(config, 3).double()
        inputs, memory = random_start(self.shape)
        assert torch.equal(self.rnn(cell).unroll(inputs, memory), plain_loop(cell, inputs, memory))

    def test_autocast_falls_back_to_the_loop(self):
        cell = random_cell(self.shape).float()
        inputs, memory = random_start(self.shape)
        memory = memory.float()
        with torch.autocast("cpu", torch.bfloat16):
            found = self.rnn(cell).unroll(inputs, memory)
            assert torch.equal(found, plain_loop(cell, inputs, memory))
