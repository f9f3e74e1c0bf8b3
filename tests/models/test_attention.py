"""The plain Transformer in the form of a cell: step by step it equals its parallel pass."""

from dataclasses import replace

import pytest
import torch

from conftest import TINY, VOCAB, random_tokens, seeded
from memtrain.config import BPTTConfig, CellConfig, DMTConfig, RunConfig, Series, SMTConfig, Stream
from memtrain.errors import MemtrainError
from memtrain.generation.sampling import sample
from memtrain.models.attention import AttentionCell
from memtrain.models.build import build_rnn
from memtrain.models.cells import make_cell
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler
from memtrain.objectives.bptt import BPTT
from memtrain.recipes import recipe
from memtrain.recipes.sizes import SIZES
from memtrain.shapes import Values

CELL = CellConfig(kind="attention", memory_tokens=4, width=16, layers=2, heads=2, head_dim=8)
ALONE = replace(TINY, cell=CELL, smt=SMTConfig(), dmt=DMTConfig())


def model() -> RNN:
    return build_rnn(ALONE, VOCAB).eval()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", (3, 4, 17))
def test_steps_give_the_memories_of_the_parallel_pass(length: int):
    rnn, tokens = model(), random_tokens(3, length)
    whole, memory = rnn.unroll(tokens), rnn.empty_memory(3)
    for step, token in enumerate(tokens.unbind(1)):
        logits, memory = rnn.step(memory, token)
        same(memory, whole[:, step])
        same(logits, rnn.predict(whole[:, step]))


def test_a_sequence_can_be_read_in_pieces():
    rnn, tokens = model(), random_tokens(2, 15)
    whole = rnn.unroll(tokens)
    first = rnn.unroll(tokens[:, :6])
    same(rnn.unroll(tokens[:, 6:], first[:, -1]), whole[:, 6:])


def test_a_state_depends_on_its_span_and_on_no_later_token():
    rnn, tokens = model(), random_tokens(1, 20)
    cell = rnn.cell
    assert isinstance(cell, AttentionCell) and cell.span == 7
    for changed, differs in ((12, False), (13, True), (19, True)):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % VOCAB
        before, after = rnn(tokens), rnn(other)
        same(before[:, :changed], after[:, :changed])
        assert torch.allclose(before[:, 19], after[:, 19], atol=1e-5) is not differs


def test_sampling_with_the_cache_equals_sampling_step_by_step():
    rnn, prompt = model(), random_tokens(3, 2)
    found = sample(rnn, prompt, 30, seeded())
    memory, expected, sampler = rnn.unroll(prompt)[:, -1], [], Sampler()
    generator = seeded()
    uniforms = torch.cat([torch.rand(n, 3, generator=generator) for n in (16, 14)])
    with torch.no_grad():
        for uniform in uniforms:
            expected.append(sampler(rnn.predict(memory), uniform))
            memory = rnn.cell(memory, expected[-1])
    assert torch.equal(found, torch.stack(expected, dim=1))


def test_sampling_rows_that_have_read_different_lengths_equals_sampling_each_alone():
    rnn, uniforms = model(), torch.rand(9, 3, generator=seeded())
    with torch.no_grad():
        read = [rnn.unroll(random_tokens(1, length))[:, -1] for length in (5, 1)]
        memory = torch.cat([*read, rnn.empty_memory(1)])
        found = rnn.write(memory, uniforms, Sampler())
        for row in range(3):
            alone = rnn.write(memory[row : row + 1], uniforms[:, row : row + 1], Sampler())
            assert torch.equal(found[0][row], alone[0][0])
            same(found[1][row], alone[1][0])


def test_the_memory_after_sampling_continues_the_sequence():
    rnn, prompt = model(), random_tokens(2, 3)
    with torch.no_grad():
        memory = rnn.unroll(prompt)[:, -1]
        tokens, after = rnn.write(memory, torch.rand(9, 2, generator=seeded()), Sampler())
        same(after, rnn.unroll(torch.cat([prompt, tokens], dim=1))[:, -1])


def test_bptt_is_the_usual_loss_of_a_language_model():
    rnn, tokens = model(), random_tokens(4, 12)
    loss = BPTT(rnn)(tokens).total
    logits = rnn(tokens)[:, :-1].flatten(0, 1)
    same(loss, torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    loss.backward()
    assert all(parameter.grad is not None for parameter in rnn.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_the_recipe_has_as_many_parameters_as_that_of_the_recurrent_cell(size: str):
    counts = [
        sum(p.numel() for p in build_rnn(recipe("text", size, "bptt", cell), 256).parameters())
        for cell in ("transformer", "attention")
    ]
    assert abs(counts[1] / counts[0] - 1) < 0.01


def test_float64_is_kept():
    rnn, tokens = model(), random_tokens(2, 6)
    single = rnn(tokens)
    memory = rnn.double().empty_memory(2)
    logits, memory = rnn.step(memory, tokens[:, 0])
    assert logits.dtype == memory.dtype == torch.float64
    same(rnn(tokens), single.double())


def test_it_trains_in_a_loop_of_ones_own():
    cell = make_cell("attention", vocab_size=VOCAB, memory_tokens=4, width=16, heads=2, head_dim=8)
    rnn, tokens = RNN(cell, vocab_size=VOCAB), random_tokens(4, 9)
    objective = BPTT(rnn)
    optimizer = torch.optim.AdamW(objective.trained_parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(objective(tokens).total)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


def test_it_is_refused_where_it_cannot_be_trained():
    with pytest.raises(MemtrainError, match="cell.kind=attention: .* method bptt of a recipe"):
        recipe("text", cell="attention")
    with pytest.raises(MemtrainError, match="a series is numbers; use transformer"):
        RunConfig(cell=CELL, data=Series(), bptt=BPTTConfig(steps=1))
    with pytest.raises(MemtrainError, match="sequences of this task are numbers"):
        build_rnn(replace(ALONE, data=Stream()), Values(features=1, targets=1))
