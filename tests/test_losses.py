import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, seeded
from memtrain.losses import (
    decode_loss,
    dynamics_loss,
    rollout_drift,
    unexplained_variance,
    uniformity_loss,
    value_loss,
)
from memtrain.shapes import IGNORE_INDEX


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def cross_entropy(logits: list[float], target: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[target]


class TestDecodeLoss:
    @pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 4)], ids=str)
    def test_is_the_mean_cross_entropy_over_targets(self, shape):
        logits = 3 * normal(*shape, VOCAB)
        targets = random_tokens(*shape)
        targets[..., ::3] = IGNORE_INDEX
        losses = [
            cross_entropy(row, target)
            for row, target in zip(
                logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True
            )
            if target != IGNORE_INDEX
        ]
        assert 0 < len(losses) < targets.numel()
        assert float(decode_loss(logits, targets)) == pytest.approx(sum(losses) / len(losses))

    def test_is_zero_with_a_finite_gradient_without_targets(self):
        logits = normal(3, 4, VOCAB).requires_grad_()
        loss = decode_loss(logits, torch.full((3, 4), IGNORE_INDEX))
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None and not logits.grad.any()


def test_losses_of_float64_have_its_digits():
    memory = torch.randn(4, 1, 8, dtype=torch.float64, generator=seeded())
    targets = torch.tensor([0, 1, 2, 3])
    for loss in (
        decode_loss(memory[:, 0], targets),
        dynamics_loss(memory, memory.roll(1, dims=0)),
        uniformity_loss(memory),
        value_loss(memory[:, 0], memory[:, 0, :4]),
    ):
        assert loss.dtype == torch.float64


class TestDynamicsLoss:
    @pytest.mark.parametrize("shape", [(4, 2, 3), (2, 3, 2, 4)], ids=str)
    def test_is_the_mean_over_every_dimension(self, shape):
        predicted, memory = normal(*shape), normal(*shape, seed=1)
        pairs = zip(predicted.flatten().tolist(), memory.flatten().tolist(), strict=True)
        squares = [(a - b) ** 2 for a, b in pairs]
        assert float(dynamics_loss(predicted, memory)) == pytest.approx(sum(squares) / len(squares))

    def test_sends_its_gradient_to_both_sides(self):
        predicted, memory = normal(4, 2, 3).requires_grad_(), normal(4, 2, 3, seed=1)
        memory.requires_grad_()
        dynamics_loss(predicted, memory).backward()
        assert predicted.grad is not None and memory.grad is not None
        assert_close(predicted.grad, 2 * (predicted - memory).detach() / predicted.numel())
        assert_close(memory.grad, -predicted.grad)

    def test_rows_count_by_their_weight(self):
        predicted, memory = normal(3, 2, 4), normal(3, 2, 4, seed=1)
        squares = (predicted - memory).square().mean(dim=(1, 2))
        weight = torch.tensor([2.0, 0.0, 1.0])
        expected = (2 * squares[0] + squares[2]) / 3
        assert_close(dynamics_loss(predicted, memory, weight), expected)

    def test_rows_of_zero_weight_give_no_loss_and_no_gradient(self):
        predicted, memory = normal(3, 2, 4).requires_grad_(), normal(3, 2, 4, seed=1)
        loss = dynamics_loss(predicted, memory, torch.zeros(3))
        loss.backward()
        assert float(loss.detach()) == 0 and predicted.grad is not None and not predicted.grad.any()


def naive_uniformity(tokens: list[list[float]]) -> float:
    unit = [[x / math.hypot(*token) for x in token] for token in tokens]
    potentials = [
        math.exp(-2 * math.dist(unit[i], unit[j]) ** 2)
        for i in range(len(unit))
        for j in range(len(unit))
        if i != j
    ]
    return math.log(sum(potentials) / len(potentials))


class TestUniformityLoss:
    @pytest.mark.parametrize("shape", [(5, 1, 3), (4, 3, 2), (2, 3, 2, 4)], ids=str)
    def test_equals_a_double_loop_over_pairs_of_unit_tokens(self, shape):
        memory = 3 * normal(*shape)
        loss = uniformity_loss(memory, 512, seeded())
        naive = naive_uniformity(memory.flatten(0, -2).tolist())
        assert float(loss) == pytest.approx(naive, abs=1e-5)

    def test_is_zero_for_collapsed_memories(self):
        memory = normal(1, 1, 16).expand(20, 2, 16)
        assert float(uniformity_loss(memory, 512, seeded())) == pytest.approx(0, abs=1e-5)

    def test_the_empty_memory_has_no_direction_and_does_not_count(self):
        memory = torch.randn(5, 2, 3, generator=seeded())
        with_empty = torch.cat([memory, torch.zeros(3, 2, 3)])
        expected = uniformity_loss(memory, 100, seeded())
        torch.testing.assert_close(uniformity_loss(with_empty, 100, seeded()), expected)

    def test_is_about_minus_4_for_memories_spread_evenly_in_many_dimensions(self):
        loss = float(uniformity_loss(normal(256, 2, 256), 512, seeded()))
        assert loss == pytest.approx(-4, abs=0.1)

    def test_of_two_opposite_tokens_is_minus_8(self):
        memory = torch.tensor([[[1.0, 2.0]], [[-2.0, -4.0]]])
        assert float(uniformity_loss(memory, 512, seeded())) == pytest.approx(-8, abs=1e-5)

    def test_its_gradient_spreads_the_tokens(self):
        memory = normal(6, 2, 8).requires_grad_()
        loss = uniformity_loss(memory, 512, seeded())
        loss.backward()
        assert memory.grad is not None
        moved = memory.detach() - 0.1 * memory.grad
        assert uniformity_loss(moved, 512, seeded()) < loss

    @pytest.mark.parametrize("samples", [2, 5, 11])
    def test_compares_at_most_the_given_number_of_tokens(self, samples):
        memory = normal(6, 2, 8).requires_grad_()
        uniformity_loss(memory, samples, seeded()).backward()
        assert memory.grad is not None
        touched = memory.grad.abs().amax(-1).flatten() > 0
        assert int(touched.sum()) == samples
        chosen = memory.detach().flatten(0, 1)[touched]
        loss = float(uniformity_loss(memory.detach(), samples, seeded()))
        assert loss == pytest.approx(naive_uniformity(chosen.tolist()), abs=1e-5)

    def test_draws_other_tokens_every_time_and_the_same_for_the_same_seed(self):
        memory, generator = normal(6, 2, 8), seeded()
        losses = [float(uniformity_loss(memory, 4, generator)) for _ in range(20)]
        assert len(set(losses)) > 15
        assert float(uniformity_loss(memory, 4, seeded())) == losses[0]


class TestDrift:
    def test_is_the_mean_squared_error_of_each_step(self):
        memories, labels = normal(5, 3, 2, 4), normal(5, 3, 2, 4, seed=1)
        found = rollout_drift(memories, labels)
        for t in range(3):
            assert_close(found[t], dynamics_loss(memories[:, t], labels[:, t]))

    def test_unexplained_variance_is_0_for_the_labels_and_1_for_their_mean(self):
        labels = 3 + 2 * normal(50, 3, 2, 4)
        assert_close(unexplained_variance(labels, labels), torch.zeros(3))
        constant = labels.mean(dim=(0, 1)).expand_as(labels)
        assert float(unexplained_variance(constant, labels).mean()) == pytest.approx(1, abs=1e-5)

    def test_a_weighted_mean_does_not_depend_on_the_scale_of_the_weights(self):
        predicted, memory = normal(3, 2, 4), normal(3, 2, 4, seed=1)
        weight = torch.tensor([1.0, 2.0, 3.0])
        assert_close(
            dynamics_loss(predicted, memory, 1e-3 * weight),
            dynamics_loss(predicted, memory, weight),
        )
