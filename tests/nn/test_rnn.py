import pytest
import torch
from torch import nn
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, seeded, tiny_cell, tiny_rnn
from memtrain.config import CellConfig, TeacherConfig
from memtrain.nn.cells import build_cell
from memtrain.nn.rnn import RNN
from memtrain.nn.teacher import Decoder

CELLS = pytest.mark.parametrize(
    ("kind", "memory_tokens", "memory_dim"),
    [("transformer", 2, 16), ("mlp", 3, 24), ("gru", 1, 8)],
    ids=lambda value: str(value),
)


@CELLS
class TestEveryCell:
    @pytest.fixture
    def rnn(self, kind, memory_tokens, memory_dim) -> RNN:
        return tiny_rnn(tiny_cell(kind, memory_tokens=memory_tokens, memory_dim=memory_dim))

    def test_empty_memory_is_zeros(self, rnn, memory_tokens, memory_dim):
        empty = rnn.empty_memory(5)
        assert empty.shape == (5, memory_tokens, memory_dim)
        assert not empty.any()

    def test_unrolling_equals_repeated_steps_from_the_empty_memory(self, rnn):
        inputs = random_tokens(3, 6)
        memories = rnn.unroll(inputs)
        logits = rnn.predict(memories)
        memory = rnn.empty_memory(3)
        for t in range(6):
            step_logits, memory = rnn.step(memory, inputs[:, t])
            assert_close(memories[:, t], memory)
            assert_close(logits[:, t], step_logits)

    def test_unrolling_goes_on_from_a_given_memory(self, rnn):
        inputs = random_tokens(3, 6)
        whole = rnn.unroll(inputs)
        assert_close(rnn.unroll(inputs[:, 2:], whole[:, 1]), whole[:, 2:])

    def test_predict_takes_any_rows_and_keeps_them_apart(self, rnn, memory_tokens, memory_dim):
        memories = torch.randn(3, 4, memory_tokens, memory_dim, generator=seeded())
        logits = rnn.predict(memories)
        assert logits.shape == (3, 4, VOCAB)
        for row in range(3):
            for t in range(4):
                alone = rnn.predict(memories[row, t][None])[0]
                assert_close(logits[row, t], alone, atol=1e-5, rtol=0)


def test_gradient_flows_back_through_all_steps():
    rnn, first = tiny_rnn(), torch.randn(2, 2, 16, generator=seeded()).requires_grad_()
    (rnn.unroll(random_tokens(2, 5), first)[:, -1] * torch.randn(2, 16)).sum().backward()
    assert first.grad is not None
    assert first.grad.abs().max() > 1e-6


def test_a_step_needs_no_teacher():
    rnn = tiny_rnn()
    assert {name.split(".")[0] for name in rnn.state_dict()} == {"cell", "readout"}
    # The cell embeds the token; the readout reads the memory and nothing else.
    embeddings = [name for name, m in rnn.named_modules() if isinstance(m, nn.Embedding)]
    assert embeddings == ["cell.embedding"]
    memory = rnn.empty_memory(1)
    for token in random_tokens(4, 1):
        logits, memory = rnn.step(memory, token)
        assert_close(logits, rnn.readout(memory)[:, 0])


def test_default_size_is_that_of_the_paper():
    cell = build_cell(CellConfig(), vocab_size=256)
    rnn = RNN(cell, Decoder(TeacherConfig(), vocab_size=256, memory_dim=256))
    assert 12.6e6 < sum(p.numel() for p in rnn.parameters()) < 12.8e6
