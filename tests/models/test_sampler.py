from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import VOCAB, seeded
from memtrain.errors import MemtrainError
from memtrain.models.sampler import Sampler

PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]  # likeliest first: tokens 1, 3, 4, 2, 0
DRAWS = 4000


def shares(probabilities: list[float] = PROBABILITIES, **options: Any) -> dict[int, float]:
    """How often each token is drawn."""
    logits = torch.tensor(probabilities).log().expand(DRAWS, -1)
    drawn = Sampler(**options)(logits, torch.rand(DRAWS, generator=seeded()))
    return {token: count / DRAWS for token, count in Counter(drawn.tolist()).items()}


def renormalised(tokens: set[int]) -> dict[int, float]:
    total = sum(PROBABILITIES[token] for token in tokens)
    return {token: PROBABILITIES[token] / total for token in tokens}


class TestSampler:
    def test_tokens_are_sampled_by_their_probability(self):
        assert shares() == pytest.approx(dict(enumerate(PROBABILITIES)), abs=0.04)

    @pytest.mark.parametrize(
        ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (4, {1, 2, 3, 4}), (5, {0, 1, 2, 3, 4})]
    )
    def test_top_k_keeps_the_k_likeliest(self, top_k, kept):
        assert shares(top_k=top_k) == pytest.approx(renormalised(kept), abs=0.04)

    def test_top_k_beyond_the_vocabulary_keeps_all(self):
        assert shares(top_k=99) == shares()

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [
            (0.01, {1}),
            (0.39, {1}),
            (0.41, {1, 3}),
            (0.64, {1, 3}),
            (0.66, {1, 3, 4}),
            (0.94, {1, 2, 3, 4}),
            (0.96, {0, 1, 2, 3, 4}),
        ],
    )
    def test_top_p_keeps_the_smallest_set_with_that_probability(self, top_p, kept):
        assert shares(top_p=top_p) == pytest.approx(renormalised(kept), abs=0.04)

    def test_top_p_applies_after_top_k(self):
        # 0.4, 0.25 and 0.2 become 0.47, 0.29 and 0.24: the first two reach 0.7.
        assert shares(top_k=3, top_p=0.7) == pytest.approx(renormalised({1, 3}), abs=0.04)

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_temperature_divides_the_logits(self, temperature):
        powers = [p ** (1 / temperature) for p in PROBABILITIES]
        expected = {token: power / sum(powers) for token, power in enumerate(powers)}
        assert shares(temperature=temperature) == pytest.approx(expected, abs=0.04)

    def test_temperature_0_takes_the_likeliest(self):
        assert shares(temperature=0.0) == {1: 1.0}

    def test_rows_are_sampled_independently(self):
        logits: Tensor = torch.full((VOCAB, VOCAB), -50.0)
        logits.fill_diagonal_(50.0)
        drawn = Sampler(top_p=0.9)(logits, torch.rand(VOCAB, generator=seeded()))
        assert drawn.tolist() == list(range(VOCAB))

    @pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1.0])
    def test_extreme_random_numbers_select_tokens_of_nonzero_probability(self, uniform):
        logits = torch.tensor([[float("-inf"), 0.3, 0.2, 0.1, float("-inf")]])
        drawn = int(Sampler()(logits, torch.tensor([uniform])))
        assert drawn == (3 if uniform > 0.5 else 1)

    def test_only_allowed_tokens(self):
        assert set(shares(allowed=2)) == {0, 1}
        assert shares(allowed=1) == {0: 1.0}

    @pytest.mark.parametrize(
        "options", [{}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.5}, {"allowed": 3}]
    )
    def test_sampling_can_be_captured_in_a_graph(self, options):
        """Tensors without values do: nothing is read back from the device."""
        with FakeTensorMode():
            drawn = Sampler(**options)(torch.randn(4, VOCAB), torch.rand(4))
        assert drawn.shape == (4,) and drawn.dtype == torch.long

    def test_is_plain_only_without_truncation(self):
        assert Sampler().is_plain and Sampler(temperature=0.5, allowed=3).is_plain
        cut = (Sampler(temperature=0.0), Sampler(top_k=2), Sampler(top_p=0.9))
        assert not any(sampler.is_plain for sampler in cut)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    def test_invalid_temperature_is_refused(self, value):
        with pytest.raises(MemtrainError, match="temperature"):
            Sampler(temperature=value)
