from typing import Any

import pytest
import torch
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, seeded, tiny_cell, tiny_rnn
from memtrain.errors import MemtrainError
from memtrain.generation.sampling import sample, sample_chunks
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler


class TestRead:
    @pytest.mark.parametrize("kind", ["transformer", "mlp", "gru", "lstm"])
    def test_generate_equals_one_step_at_a_time(self, kind):
        rnn, inputs = tiny_rnn(tiny_cell(kind)), random_tokens(3, 6)
        logits, memories = rnn.read(inputs)
        memory = rnn.empty_memory(3)
        for t in range(6):
            step_logits, memory = rnn.step(memory, inputs[:, t])
            assert_close(logits[:, t], step_logits)
            assert_close(memories[:, t], memory)

    def test_generate_continues_from_a_given_memory(self):
        rnn, inputs = tiny_rnn(), random_tokens(3, 6)
        logits, memories = rnn.read(inputs)
        later_logits, later = rnn.read(inputs[:, 4:], memories[:, 3])
        assert_close(later_logits, logits[:, 4:])
        assert_close(later, memories[:, 4:])

    def test_generate_keeps_no_autograd_graph(self):
        logits, memories = tiny_rnn().read(random_tokens(2, 3))
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


class TestSample:
    prompt = random_tokens(3, 4)

    @pytest.mark.parametrize(
        "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str
    )
    def test_greedy_options_equal_greedy_choice_by_hand(self, options):
        rnn = sharp_rnn()
        written = sample(rnn, self.prompt, 7, seeded(), **options)
        assert written.tolist() == [greedy(rnn, row, 7) for row in self.prompt.tolist()]

    def test_the_seed_determines_the_tokens(self):
        rnn = tiny_rnn()
        first, again, other = (
            sample(rnn, self.prompt, 12, seeded(seed)).tolist() for seed in (5, 5, 6)
        )
        assert first == again != other

    def test_the_generator_is_the_only_source_of_randomness(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        rnn = tiny_rnn()
        torch.set_rng_state(before)
        sample(rnn, self.prompt, 5, seeded())
        assert torch.equal(torch.get_rng_state(), before)

    def test_each_token_is_read_before_the_next_is_sampled(self):
        # Generate one token at a time, each time with all previous tokens as the prompt.
        rnn, generator, text = sharp_rnn(), seeded(), self.prompt
        for _ in range(5):
            text = torch.cat([text, sample(rnn, text, 1, generator)], dim=1)
        at_once = sample(rnn, self.prompt, 5, seeded())
        assert text[:, 4:].tolist() == at_once.tolist()

    @pytest.mark.parametrize("allowed", [1, 3, VOCAB])
    @pytest.mark.parametrize("temperature", [0.0, 5.0])
    def test_only_allowed_tokens_are_sampled(self, allowed, temperature):
        rnn = tiny_rnn()
        written = sample(
            rnn, random_tokens(20, 2), 20, seeded(), temperature=temperature, allowed=allowed
        )
        assert int(written.max()) < allowed
        if temperature:
            assert set(written.flatten().tolist()) == set(range(allowed))

    def test_the_likeliest_allowed_token_is_chosen(self):
        rnn = sharp_rnn()
        written = sample(rnn, self.prompt, 6, seeded(), temperature=0.0, allowed=3)
        assert written.tolist() == [greedy(rnn, row, 6, 3) for row in self.prompt.tolist()]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": torch.empty(2, 0, dtype=torch.long)}, "prompt: must hold at least one"),
            ({"length": 0}, "length=0: must be at least 1"),
            ({"temperature": -0.1}, "temperature=-0.1: must be at least 0.01 and finite, or 0"),
            ({"temperature": 1e-300}, "temperature=1e-300: must be at least 0.01 and finite, or 0"),
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
            sample(tiny_rnn(), generator=seeded(), **arguments)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("chunk", [1, 3, 5, 99])
    def test_chunks_add_up_to_the_whole(self, chunk):
        rnn = tiny_rnn()
        pieces = list(sample_chunks(rnn, self.prompt, 7, seeded(3), Sampler(), chunk))
        assert all(piece.shape[1] <= chunk for piece in pieces)
        whole = sample(rnn, self.prompt, 7, seeded(3))
        assert torch.equal(torch.cat(pieces, dim=1), whole)

    def test_a_long_prompt_is_read_to_its_end(self):
        rnn, prompt = sharp_rnn(), random_tokens(1, 300)
        written = sample(rnn, prompt, 3, seeded(), temperature=0.0)
        assert written.tolist() == [greedy(rnn, prompt[0].tolist(), 3)]
