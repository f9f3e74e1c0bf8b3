from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, seeded, tiny_cell, tiny_rnn
from memtrain.errors import MemtrainError
from memtrain.eval.rollout import read, sample_token, write
from memtrain.nn.rnn import RNN


class TestRead:
    @pytest.mark.parametrize("kind", ["transformer", "mlp", "gru"])
    def test_equals_step_after_step(self, kind):
        rnn, inputs = tiny_rnn(tiny_cell(kind)), random_tokens(3, 6)
        logits, memories = read(rnn, inputs)
        memory = rnn.empty_memory(3)
        for t in range(6):
            step_logits, memory = rnn.step(memory, inputs[:, t])
            assert_close(logits[:, t], step_logits)
            assert_close(memories[:, t], memory)

    def test_goes_on_from_a_given_memory(self):
        rnn, inputs = tiny_rnn(), random_tokens(3, 6)
        logits, memories = read(rnn, inputs)
        later_logits, later = read(rnn, inputs[:, 4:], memories[:, 3])
        assert_close(later_logits, logits[:, 4:])
        assert_close(later, memories[:, 4:])

    def test_keeps_no_graph(self):
        logits, memories = read(tiny_rnn(), random_tokens(2, 3))
        assert not logits.requires_grad and not memories.requires_grad


def sharp_rnn() -> RNN:
    """Its logits lie far apart, so that greedy choices have no ties."""
    rnn = tiny_rnn()
    with torch.no_grad():
        rnn.readout.head.weight.mul_(20)
    return rnn


def greedy(rnn: RNN, prompt: list[int], length: int, allowed: int = VOCAB) -> list[int]:
    memory, written = rnn.empty_memory(1), []
    logits = torch.empty(0)
    for token in prompt:
        logits, memory = rnn.step(memory, torch.tensor([token]))
    for _ in range(length):
        row = logits[0, :allowed].tolist()
        written.append(row.index(max(row)))
        logits, memory = rnn.step(memory, torch.tensor([written[-1]]))
    return written


class TestWrite:
    prompt = random_tokens(3, 4)

    @pytest.mark.parametrize(
        "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str
    )
    def test_of_the_likeliest_tokens_equals_greedy_choice_by_hand(self, options):
        rnn = sharp_rnn()
        written = write(rnn, self.prompt, 7, seeded(), **options)
        assert written.tolist() == [greedy(rnn, row, 7) for row in self.prompt.tolist()]

    def test_the_same_seed_writes_the_same_tokens_and_another_seed_others(self):
        rnn = tiny_rnn()
        first, again, other = (
            write(rnn, self.prompt, 12, seeded(seed)).tolist() for seed in (5, 5, 6)
        )
        assert first == again != other

    def test_chance_comes_from_the_generator_alone(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        rnn = tiny_rnn()
        torch.set_rng_state(before)
        write(rnn, self.prompt, 5, seeded())
        assert torch.equal(torch.get_rng_state(), before)

    def test_what_was_written_is_read_before_the_next_token(self):
        # Written one token at a time, each time with all that stands before as the prompt.
        rnn, generator, text = sharp_rnn(), seeded(), self.prompt
        for _ in range(5):
            text = torch.cat([text, write(rnn, text, 1, generator)], dim=1)
        at_once = write(rnn, self.prompt, 5, seeded())
        assert text[:, 4:].tolist() == at_once.tolist()

    @pytest.mark.parametrize("allowed", [1, 3, VOCAB])
    @pytest.mark.parametrize("temperature", [0.0, 5.0])
    def test_only_allowed_tokens_are_written(self, allowed, temperature):
        rnn = tiny_rnn()
        written = write(
            rnn, random_tokens(20, 2), 20, seeded(), temperature=temperature, allowed=allowed
        )
        assert int(written.max()) < allowed
        if temperature:
            assert set(written.flatten().tolist()) == set(range(allowed))

    def test_allowed_tokens_are_chosen_by_their_own_likelihood(self):
        rnn = sharp_rnn()
        written = write(rnn, self.prompt, 6, seeded(), temperature=0.0, allowed=3)
        assert written.tolist() == [greedy(rnn, row, 6, 3) for row in self.prompt.tolist()]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": torch.empty(2, 0, dtype=torch.long)}, "prompt: must hold at least one"),
            ({"length": 0}, "length=0: must be at least 1"),
            ({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
            ({"top_k": -1}, "top_k=-1: must be at least 0"),
            ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
            ({"top_p": 1.1}, "top_p=1.1: must be above 0 and at most 1"),
            ({"allowed": -1}, "allowed=-1: must be at least 0"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_bad_arguments_are_refused_in_one_line(self, options, message):
        arguments: dict[str, Any] = {"prompt": self.prompt, "length": 2, **options}
        with pytest.raises(MemtrainError) as caught:
            write(tiny_rnn(), generator=seeded(), **arguments)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]  # likeliest first: tokens 1, 3, 4, 2, 0
DRAWS = 4000


def shares(probabilities: list[float] = PROBABILITIES, **options: Any) -> dict[int, float]:
    """How often each token is drawn."""
    logits = torch.tensor(probabilities).log().expand(DRAWS, -1)
    drawn = sample_token(logits, seeded(), **options)
    return {token: count / DRAWS for token, count in Counter(drawn.tolist()).items()}


def renormalised(tokens: set[int]) -> dict[int, float]:
    total = sum(PROBABILITIES[token] for token in tokens)
    return {token: PROBABILITIES[token] / total for token in tokens}


class TestSampleToken:
    def test_draws_tokens_by_their_probability(self):
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

    def test_top_p_counts_among_what_top_k_left(self):
        # 0.4, 0.25 and 0.2 become 0.47, 0.29 and 0.24: the first two reach 0.7.
        assert shares(top_k=3, top_p=0.7) == pytest.approx(renormalised({1, 3}), abs=0.04)

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_temperature_divides_the_logits(self, temperature):
        powers = [p ** (1 / temperature) for p in PROBABILITIES]
        expected = {token: power / sum(powers) for token, power in enumerate(powers)}
        assert shares(temperature=temperature) == pytest.approx(expected, abs=0.04)

    def test_temperature_0_takes_the_likeliest(self):
        assert shares(temperature=0.0) == {1: 1.0}

    def test_rows_are_drawn_apart(self):
        logits: Tensor = torch.full((VOCAB, VOCAB), -50.0)
        logits.fill_diagonal_(50.0)
        assert sample_token(logits, seeded(), top_p=0.9).tolist() == list(range(VOCAB))
