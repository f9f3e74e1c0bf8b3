"""Memories that collapse are told from memories that are spread out."""

import math

import pytest
import torch

from memtrain.evaluation.memories import SpreadAccumulator, effective_rank


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_effective_rank_counts_equal_directions(scale: float):
    rows = torch.zeros(12, 7)
    rows[:9, :3] = torch.eye(3).repeat(3, 1)  # three directions, three rows each
    assert effective_rank(scale * rows) == pytest.approx(3)


def test_effective_rank_of_unequal_directions_is_the_entropy_of_their_sizes():
    shares = torch.tensor([0.7, 0.2, 0.1])
    expected = math.exp(-sum(float(share) * math.log(float(share)) for share in shares))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    assert effective_rank(torch.diag(5 * shares) @ turn) == pytest.approx(expected, rel=1e-5)


def test_effective_rank_of_degenerate_rows():
    assert effective_rank(torch.ones(8, 5)) == pytest.approx(1)
    assert effective_rank(torch.zeros(8, 5)) == 0
    assert math.isnan(effective_rank(torch.full((2, 2), torch.nan)))


def test_collapsed_memories_have_little_spread():
    generator = torch.Generator().manual_seed(0)
    memories = torch.randn(16, 20, 2, 8, generator=generator)

    def spread(values: torch.Tensor):
        found = SpreadAccumulator(len(values))
        for part in values.split(6):
            found.add(part)
        return found.spread()

    free = spread(memories)
    flat = spread(memories * (torch.arange(8) < 2))  # each token in a plane
    same = spread(memories[:1, :1].expand(16, 20, 2, 8))
    assert free.effective_rank > 14 and free.uniformity < -2.5
    assert 3 < flat.effective_rank < 4.1 and free.uniformity < flat.uniformity < -1
    assert same.effective_rank == pytest.approx(1)


def test_a_spread_is_the_same_for_the_same_sequences():
    memories = torch.randn(8, 200, 1, 4, generator=torch.Generator().manual_seed(1))
    one, other = SpreadAccumulator(8), SpreadAccumulator(8)
    one.add(memories)
    other.add(memories)
    assert one.spread() == other.spread()
