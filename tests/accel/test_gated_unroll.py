"""A GRU unrolled layer by layer: the plain loop's memories and gradients, in fp64."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from conftest import assert_unrolls_as_the_loop, plain_loop
from memtrain.accel.engine import Engine
from memtrain.accel.fast_paths import RNNLoops
from memtrain.accel.gated_unroll import UnrolledGRU
from memtrain.config import CellConfig, EngineConfig, TeacherConfig
from memtrain.models.cells import GRUCell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder

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


def test_autocast_does_not_round_the_state():
    cell = random_gru(2).float()
    inputs, memory = random_gru_start(cell)
    expected = plain_loop(cell, inputs, memory.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(plain_loop(cell, inputs, memory.float()), expected, rtol=0, atol=0)
        assert_close(UnrolledGRU()(cell, inputs, memory.float()), expected, rtol=1e-5, atol=1e-6)
        assert cell(memory.bfloat16(), inputs[:, 0]).dtype == torch.float32


def test_engine_attaches_it_to_our_gru_only():
    class Doubled(GRUCell):
        def forward(self, memory: Tensor, token: Tensor) -> Tensor:
            return 2 * super().forward(memory, token)

    config = CellConfig(kind="gru", memory_tokens=2, memory_dim=6)
    decoder = TeacherConfig(width=8, decoder_layers=1, heads=2, head_dim=4)
    engine = Engine(EngineConfig(device="cpu"))
    inputs = torch.randint(5, (3, 4))
    for kind in (GRUCell, Doubled):
        rnn = RNN(kind(config, 5), Decoder(decoder, 5, 6))
        engine.prepare(rnn)
        assert isinstance(rnn.fast, RNNLoops) == (kind is GRUCell)
        if isinstance(rnn.fast, RNNLoops):
            assert isinstance(rnn.fast.unroller, UnrolledGRU)
            assert rnn.fast.unroller.serves(rnn.cell, rnn.empty_memory(3))
        assert not UnrolledGRU().serves(Doubled(config, 5), rnn.empty_memory(3))
        expected = plain_loop(rnn.cell, inputs, rnn.empty_memory(3))
        assert_close(rnn.unroll(inputs), expected, rtol=1e-5, atol=1e-6)
