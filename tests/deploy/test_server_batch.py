"""Rows advance together, and no row's result depends on another."""

import pytest
import torch

from conftest import seeded, tiny_cell, tiny_rnn
from memtrain.deploy.server.batch import Batch, independent_widths
from memtrain.models.rnn import RNN
from memtrain.models.wrap import wrap


@pytest.mark.parametrize("kind", ["transformer", "gru", "lstm", "mlp"])
def test_rows_that_join_and_leave_have_the_logits_of_plain_steps(kind: str):
    rnn = tiny_rnn(tiny_cell(kind)).eval()
    batch, memories = Batch(rnn, 6), []
    tokens = torch.randint(rnn.vocab_size, (30, 6), generator=seeded()).tolist()
    with torch.no_grad():
        for step, row in enumerate(tokens):
            if len(memories) < 6:
                start = torch.randn(2, 16, generator=seeded(step)) if step % 2 else None
                batch.join(start)
                memories.append(rnn.empty_memory(1) if start is None else start[None])
            if step % 4 == 3:
                gone = step % len(memories)
                torch.testing.assert_close(batch.leave(gone), memories[gone][0])
                memories[gone] = memories[-1]
                memories.pop()
            expected = []
            for place, memory in enumerate(memories):
                logits, memories[place] = rnn.step(memory, torch.tensor(row[place : place + 1]))
                expected.append(logits)
            found = batch.step(row[: len(memories)])
            torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_batch_wider_than_any_group_is_computed_in_groups():
    rnn = tiny_rnn().eval()
    batch, one = Batch(rnn, 7), Batch(rnn, 7)
    batch.widths = one.widths = [1, 2]
    for _ in range(7):
        batch.join(None)
    one.join(None)
    logits = batch.step([3] * 7)
    assert logits.shape == (7, rnn.vocab_size)
    torch.testing.assert_close(logits, one.step([3]).expand(7, -1))


class DependsOnWidth(torch.nn.Module):
    """A cell whose results depend on the number of rows, or on the other rows."""

    memory_tokens, memory_dim = 1, 16

    def __init__(self, narrowest: int, *, mixes: bool) -> None:
        super().__init__()
        self.narrowest, self.mixes, self.cell = narrowest, mixes, torch.nn.GRUCell(16, 16)
        self.embedding = torch.nn.Embedding(7, 16)

    def forward(self, memory: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        new = torch.stack(
            [self.cell(self.embedding(t)[None], m) for m, t in zip(memory, token, strict=True)]
        )
        if len(memory) < self.narrowest:
            return new + 1e-6
        return new + 1e-3 * new.mean(0) if self.mixes and len(memory) > 2 else new


def trial(narrowest: int = 0, *, mixes: bool = False) -> RNN:
    rnn = tiny_rnn(wrap(torch.nn.GRUCell(16, 16), vocab_size=7))
    rnn.cell = DependsOnWidth(narrowest, mixes=mixes)
    # The real one depends on the width itself.
    rnn.predict = lambda memory, hidden=False: memory[:, 0, :7]
    return rnn.eval()


def test_only_widths_with_the_same_bits_are_used():
    assert independent_widths(trial(), 12) == [1, 2, 4, 8, 12]
    assert independent_widths(trial(3), 12) == [4, 8, 12]
    assert independent_widths(trial(mixes=True), 8) == [1, 2]
    assert independent_widths(trial(), 1) == [1]
