import pytest
import torch
from torch import nn
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, receives_gradient, seeded, tiny_cell, tiny_rnn
from memtrain.config import CellConfig, TeacherConfig
from memtrain.errors import MemtrainError
from memtrain.models.cells import build_cell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder
from memtrain.objectives.bptt import BPTT

CELLS = pytest.mark.parametrize(
    ("kind", "memory_tokens", "memory_dim"),
    [("transformer", 2, 16), ("mlp", 3, 24), ("gru", 1, 8), ("lstm", 2, 8)],
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

    def test_calling_the_rnn_reads_whole_sequences_from_the_empty_memory(self, rnn):
        inputs = random_tokens(3, 6)
        logits = rnn(inputs)
        assert logits.shape == (3, 6, VOCAB)
        assert_close(logits, rnn.predict(rnn.unroll(inputs)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())
        assert receives_gradient(loss, rnn.cell) and receives_gradient(loss, rnn.readout)

    def test_unrolling_continues_from_a_given_memory(self, rnn):
        inputs = random_tokens(3, 6)
        whole = rnn.unroll(inputs)
        assert_close(rnn.unroll(inputs[:, 2:], whole[:, 1]), whole[:, 2:])

    def test_float64_is_kept_from_the_empty_memory_to_the_loss(self, rnn):
        inputs, single = random_tokens(3, 6), rnn(random_tokens(3, 6))
        rnn.double()
        assert rnn.empty_memory(3).dtype == torch.float64
        assert_close(rnn(inputs), single.double(), atol=1e-5, rtol=1e-5)
        weight, objective = rnn.readout.head.weight, BPTT(rnn)
        objective(inputs).total.backward()
        with torch.no_grad():  # differences that float32 has no digits for
            moved = torch.zeros_like(weight)
            moved[2, 3] = 1e-6
            both = []
            for sign in (1, -1):
                weight += sign * moved
                both.append(objective(inputs).total)
                weight -= sign * moved
        assert weight.grad is not None
        assert_close((both[0] - both[1]) / 2e-6, weight.grad[2, 3], rtol=1e-5, atol=1e-9)

    def test_predict_treats_rows_independently(self, rnn, memory_tokens, memory_dim):
        memories = torch.randn(3, 4, memory_tokens, memory_dim, generator=seeded())
        logits = rnn.predict(memories)
        assert logits.shape == (3, 4, VOCAB)
        for row in range(3):
            for t in range(4):
                alone = rnn.predict(memories[row, t][None])[0]
                assert_close(logits[row, t], alone, atol=1e-5, rtol=0)


def refusal(method, *arguments) -> str:
    """The error message, without the tests' own type check, which would raise first."""
    with pytest.raises(MemtrainError) as caught:
        getattr(method, "__wrapped__", method)(tiny_rnn(), *arguments)
    assert caught.value.__suppress_context__  # the embedding's own words say less
    return str(caught.value)


MEMORY = torch.zeros(2, 2, 16)


@pytest.mark.parametrize(
    ("memory", "token", "message"),
    [
        (MEMORY, 3, "token=3: must be a tensor of whole numbers, such as torch.tensor([3])"),
        (MEMORY, torch.tensor([99, 1]), "token: contains 99, outside the vocabulary 0..6"),
        (MEMORY, torch.tensor([1, -1]), "token: contains -1, outside the vocabulary 0..6"),
        (MEMORY, torch.tensor([1.0, 2.0]), "token: must be int64, not torch.float32; token.long()"),
        (MEMORY, torch.tensor([1, 2, 3]), "token: must have shape (2,), as many as memory has"),
        (MEMORY, torch.tensor(3), "token: must have shape (2,)"),
        (MEMORY[0], torch.tensor([3]), "memory: must be a tensor of shape (B, 2, 16), not (2, 16)"),
        (None, torch.tensor([3]), "memory: must be a tensor of shape (B, 2, 16), not NoneType"),
    ],
    ids=["int", "large", "negative", "float", "rows", "scalar", "memory", "none"],
)
def test_a_step_explains_invalid_arguments(memory, token, message):
    assert refusal(RNN.step, memory, token).startswith(message)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], "tokens=[[1, 2]]: must be a tensor of whole numbers"),
        (torch.tensor([1, 2]), "tokens: must have shape (B, T), not (2,); such as"),
        (torch.zeros(2, 0, dtype=torch.long), "tokens: must have shape (B, T), not (2, 0)"),
        (torch.tensor([[1, 99]]), "tokens: contains 99, outside the vocabulary 0..6"),
        (torch.tensor([[-1, 1]]), "tokens: contains -1, outside the vocabulary 0..6"),
        (torch.ones(2, 3), "tokens: must be int64, not torch.float32; tokens.long()"),
    ],
    ids=["list", "row", "empty", "large", "negative", "float"],
)
def test_a_call_explains_invalid_tokens(tokens, message):
    assert refusal(RNN.forward, tokens).startswith(message)


def test_an_error_raised_by_the_cell_is_unchanged():
    class Raises(nn.Module):
        memory_tokens, memory_dim = 2, 16

        def forward(self, memory, token):
            raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        tiny_rnn(Raises()).step(MEMORY, torch.tensor([1, 2]))


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
    cell = build_cell(CellConfig(), 256)
    rnn = RNN(cell, Decoder(TeacherConfig(), vocab_size=256, memory_dim=256))
    assert 12.6e6 < sum(p.numel() for p in rnn.parameters()) < 12.8e6
