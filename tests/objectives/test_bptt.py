import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from conftest import (
    gradients,
    random_batch,
    random_tokens,
    receives_gradient,
    seeded,
    tiny_cell,
    tiny_rnn,
)
from memtrain.config import BPTTConfig
from memtrain.errors import MemtrainError
from memtrain.evaluation.cost import CountedCell, recurrent_depth, sequential_ops
from memtrain.models.rnn import RNN
from memtrain.objectives.bptt import BPTT
from memtrain.shapes import IGNORE_INDEX, Batch

CASES = pytest.mark.parametrize(
    ("length", "truncate"),
    [(6, 0), (6, 1), (6, 2), (7, 3), (5, 4), (5, 5), (5, 9)],
    ids=lambda n: str(n),
)


def naive_bptt(rnn: RNN, batch: Batch, truncate: int) -> Tensor:
    """One step after another; the memory is cut from its past before every `truncate`-th."""
    memory, losses = rnn.empty_memory(len(batch.inputs)), []
    for t in range(batch.inputs.shape[1]):
        if truncate and t % truncate == 0:
            memory = memory.detach()
        logits, memory = rnn.step(memory, batch.inputs[:, t])
        for row in range(len(logits)):
            if batch.targets[row, t] != IGNORE_INDEX:
                losses.append(F.cross_entropy(logits[row], batch.targets[row, t]))
    return torch.stack(losses).mean()


@CASES
@pytest.mark.parametrize("kind", ["transformer", "mlp", "gru", "lstm"])
def test_loss_and_gradients_equal_a_loop_that_cuts_the_memory(kind, length, truncate):
    rnn, batch = tiny_rnn(tiny_cell(kind)), random_batch(3, length)
    losses = BPTT(rnn, BPTTConfig(truncate=truncate))(batch, seeded())
    expected = naive_bptt(rnn, batch, truncate)
    assert_close(losses.total, expected)
    assert_close(losses.parts["readout"], expected.detach())
    parameters = list(rnn.parameters())
    for one, other in zip(
        gradients(losses.total, parameters), gradients(expected, parameters), strict=True
    ):
        assert_close(one, other, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("recompute", [1, 2, 3, 50], ids=lambda n: f"recompute{n}")
@pytest.mark.parametrize(("length", "truncate"), [(6, 0), (7, 3), (5, 4)], ids=lambda n: str(n))
@pytest.mark.parametrize("kind", ["transformer", "gru"])
def test_recomputing_changes_neither_loss_nor_gradients(kind, length, truncate, recompute):
    rnn, batch = tiny_rnn(tiny_cell(kind)), random_batch(3, length)
    losses = BPTT(rnn, BPTTConfig(truncate=truncate, recompute=recompute))(batch, seeded())
    expected = naive_bptt(rnn, batch, truncate)
    assert_close(losses.total, expected)
    parameters = list(rnn.parameters())
    for one, other in zip(
        gradients(losses.total, parameters), gradients(expected, parameters), strict=True
    ):
        assert_close(one, other, atol=1e-6, rtol=1e-3)


def kept_elements(recompute: int, length: int) -> int:
    """How many numbers autograd keeps for the backward pass of a BPTT loss."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    rnn = tiny_rnn()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        BPTT(rnn, BPTTConfig(recompute=recompute))(random_batch(2, length), seeded())
    return sum(kept.values())


def test_recomputing_keeps_a_quarter_or_less():
    assert kept_elements(4, 16) < kept_elements(0, 16) / 4


def test_a_cell_with_dropout_drops_the_same_when_recomputed():
    class Dropping(torch.nn.Module):
        memory_tokens, memory_dim = 2, 16

        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(16, 16)
            self.embedding = torch.nn.Embedding(9, 16)

        def forward(self, memory: Tensor, token: Tensor) -> Tensor:
            return F.dropout(self.mix(memory) + self.embedding(token)[:, None], 0.5)

    torch.manual_seed(0)
    rnn, batch = tiny_rnn(Dropping()), random_batch(3, 6)
    results = []
    for recompute in (0, 6):
        torch.manual_seed(1)
        total = BPTT(rnn, BPTTConfig(recompute=recompute))(batch, seeded()).total
        results.append([total, *gradients(total, list(rnn.parameters()))])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@CASES
def test_truncation_does_not_change_the_loss(length, truncate):
    rnn, batch = tiny_rnn(), random_batch(3, length)
    cut = BPTT(rnn, BPTTConfig(truncate=truncate))(batch, seeded()).total
    full = BPTT(rnn, BPTTConfig())(batch, seeded()).total
    assert torch.equal(cut, full)


def test_truncation_changes_the_gradient():
    rnn, batch = tiny_rnn(), random_batch(3, 6)
    cut = BPTT(rnn, BPTTConfig(truncate=2))(batch, seeded()).total
    full = BPTT(rnn, BPTTConfig())(batch, seeded()).total
    pairs = zip(
        gradients(cut, rnn.cell.parameters()), gradients(full, rnn.cell.parameters()), strict=True
    )
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-4


@pytest.mark.parametrize(
    ("length", "truncate", "depth"),
    [(4, 0, 4), (8, 0, 8), (16, 0, 16), (16, 4, 4), (16, 1, 1), (7, 3, 3), (5, 9, 5)],
    ids=lambda n: str(n),
)
def test_credit_passes_as_many_applications_as_the_truncation_allows(length, truncate, depth):
    objective = BPTT(tiny_rnn(CountedCell(tiny_cell())), BPTTConfig(truncate=truncate))
    assert recurrent_depth(objective(random_batch(2, length), seeded()).total) == depth


# ------------------------------------------------------------------------- pieces at once


def naive_sweeps(rnn: RNN, batch: Batch, truncate: int, sweeps: int) -> Tensor:
    """Each piece on its own: read the pieces before it from the empty memory, then train it."""
    losses, length = [], batch.inputs.shape[1]
    for begin in range(0, length, truncate):
        memory = rnn.empty_memory(len(batch.inputs))
        with torch.no_grad():
            for t in range(max(0, begin - sweeps * truncate), begin):
                _, memory = rnn.step(memory, batch.inputs[:, t])
        for t in range(begin, min(begin + truncate, length)):
            logits, memory = rnn.step(memory, batch.inputs[:, t])
            kept = batch.targets[:, t] != IGNORE_INDEX
            losses.append(F.cross_entropy(logits[kept], batch.targets[kept, t], reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize(
    ("length", "truncate", "sweeps"),
    [(6, 2, 1), (6, 2, 2), (7, 3, 1), (5, 4, 1), (8, 2, 3), (8, 2, 9), (5, 9, 1), (4, 1, 2)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("kind", ["transformer", "mlp", "gru", "lstm"])
def test_pieces_at_once_equal_pieces_one_by_one(kind, length, truncate, sweeps):
    rnn, batch = tiny_rnn(tiny_cell(kind)), random_batch(3, length)
    total = BPTT(rnn, BPTTConfig(truncate=truncate, sweeps=sweeps))(batch, seeded()).total
    expected = naive_sweeps(rnn, batch, truncate, sweeps)
    assert_close(total, expected)
    parameters = list(rnn.parameters())
    for one, other in zip(
        gradients(total, parameters), gradients(expected, parameters), strict=True
    ):
        assert_close(one, other, atol=1e-6, rtol=1e-3)


def test_enough_sweeps_equal_pieces_in_order():
    rnn, batch = tiny_rnn(), random_batch(3, 11)
    losses = [
        BPTT(rnn, BPTTConfig(truncate=3, sweeps=sweeps))(batch, seeded()).total
        for sweeps in (0, 3, 1)
    ]
    assert_close(losses[0], losses[1])
    assert abs(losses[0] - losses[2]) > 1e-5  # a third piece starts two pieces late


def test_sequential_operations_of_pieces_at_once_do_not_grow_with_the_length():
    counts = {
        (sweeps, length): sequential_ops(
            lambda length=length, sweeps=sweeps: (
                BPTT(tiny_rnn(), BPTTConfig(truncate=4, sweeps=sweeps))(
                    random_batch(2, length), seeded()
                ).total
            )
        )
        for sweeps in (0, 1)
        for length in (8, 16, 32)
    }
    assert counts[1, 8] == counts[1, 16] == counts[1, 32] < counts[0, 16]
    assert counts[0, 32] - counts[0, 16] == 2 * (counts[0, 16] - counts[0, 8]) > 0


def test_pieces_at_once_reach_as_far_back_as_sweeps_and_pieces():
    """A token before them changes nothing; the last of the pieces that are read does."""
    torch.manual_seed(0)
    rnn, batch = tiny_rnn(tiny_cell("gru")), random_batch(1, 12)
    targets = batch.targets.clone()
    targets[:, :8] = IGNORE_INDEX

    def loss(position: int) -> float:
        inputs = batch.inputs.clone()
        inputs[:, position] = (inputs[:, position] + 1) % 5
        objective = BPTT(rnn, BPTTConfig(truncate=4, sweeps=1))
        return float(objective(Batch(inputs, targets), seeded()).total.detach())

    assert loss(0) == loss(3)
    assert loss(4) != loss(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sweeps": 1}, "sweeps=1 with truncate=0: the sequence is one piece; set truncate"),
        ({"sweeps": 1, "truncate": 4, "recompute": 2}, "recompute=2 with sweeps=1: pieces"),
    ],
)
def test_sweeps_need_pieces_that_are_kept(settings, words):
    with pytest.raises(MemtrainError, match=words):
        BPTTConfig(**settings)


def test_cell_and_readout_train():
    rnn, batch = tiny_rnn(), random_batch(2, 5)
    objective = BPTT(rnn, BPTTConfig())
    assert objective.trained() == {"rnn": rnn}
    total = objective(batch, seeded()).total
    assert receives_gradient(total, rnn.cell)
    assert receives_gradient(total, rnn.readout)


def test_sequential_operations_grow_by_the_same_number_for_every_token():
    objective = BPTT(tiny_rnn(), BPTTConfig())
    counts = []
    for length in (4, 5, 8, 12):
        batch = random_batch(2, length)
        counts.append(sequential_ops(lambda b=batch: objective(b, seeded()).total))
    per_token = counts[1] - counts[0]
    assert per_token > 0
    assert [count - counts[0] for count in counts] == [0, per_token, 4 * per_token, 8 * per_token]


def test_without_any_target_the_loss_is_zero_with_a_finite_gradient():
    inputs, rnn = random_tokens(2, 4), tiny_rnn()
    batch = Batch(inputs, torch.full_like(inputs, IGNORE_INDEX))
    total = BPTT(rnn, BPTTConfig())(batch, seeded()).total
    assert total.item() == 0
    assert all(not g.any() for g in gradients(total, rnn.parameters()))
