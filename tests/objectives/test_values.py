"""Sequences of numbers: objectives, missing numbers, and equality of fast and plain paths."""

import copy

import pytest
import torch
from torch import nn

import memtrain
from memtrain.accel.cpu_unroll import FusedUnroll
from memtrain.accel.fast_paths import loops
from memtrain.accel.gated_unroll import UnrolledGRU, UnrolledLSTM
from memtrain.errors import MemtrainError
from memtrain.losses import value_loss
from memtrain.objectives.futures import gather_window
from memtrain.shapes import Batch, Values

VALUES = Values(features=3, targets=2)
SIZE: dict = {"width": 16, "heads": 2, "head_dim": 8}
MEMORY: dict = {"memory_tokens": 2, "memory_dim": 16}
CELLS: dict[str, dict] = {
    "gru": {},
    "lstm": {},
    "mlp": {"width": 16, "layers": 1},
    "transformer": SIZE | {"layers": 2},
}


def models(
    kind: str = "gru", encoder: str = "causal", values: Values = VALUES, **teacher
) -> tuple[memtrain.Teacher, memtrain.RNN]:
    torch.manual_seed(0)
    sizes: dict = SIZE | {"encoder_layers": 2, "decoder_layers": 1, "context_length": 4} | teacher
    taught = memtrain.Teacher(values=values, encoder=encoder, **MEMORY, **sizes)
    cell = memtrain.make_cell(kind, values=values, **MEMORY, **CELLS[kind])
    return taught, memtrain.RNN(cell, taught)


def sequences(rows: int = 3, steps: int = 7, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(rows, steps, VALUES.features, generator=generator)
    gaps = torch.rand(numbers.shape, generator=generator) < missing
    return numbers.masked_fill(gaps, torch.nan)


@pytest.mark.parametrize("encoder", ["causal", "bidirectional"])
@pytest.mark.parametrize("kind", CELLS)
def test_every_cell_trains_by_every_objective_with_missing_numbers(kind, encoder):
    teacher, rnn = models(kind, encoder)
    for objective in (
        memtrain.SMT(teacher, rnn, timesteps=0, future_length=3),
        memtrain.SMT(teacher, rnn, timesteps=2, future_length=3, dynamics_steps=2),
        memtrain.DMT(teacher, rnn, decode_weight=1.0, train_teacher=True),
        memtrain.DMT(teacher, rnn, through_time=True, empty_start=0.0, rollout_length=3),
        memtrain.BPTT(rnn),
        memtrain.BPTT(rnn, recompute=2, truncate=3),
    ):
        losses = objective(sequences(missing=0.2))
        losses.total.backward()
        assert all(torch.isfinite(part) for part in losses.parts.values()), objective
        for name, parameter in objective.named_parameters():
            found = parameter.grad
            assert found is None or bool(found.isfinite().all()), (objective, name)
        objective.zero_grad()


def test_recomputed_bptt_gives_the_same_loss_and_gradients():
    _, rnn = models("gru")
    batch = sequences(missing=0.3)
    whole, recomputed = memtrain.BPTT(rnn), memtrain.BPTT(rnn, recompute=2)
    found = []
    for objective in (whole, recomputed):
        rnn.zero_grad()
        loss = objective(batch).total
        loss.backward()
        found.append(
            (loss.detach(), [p.grad.clone() for p in rnn.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_a_missing_number_has_no_influence_but_by_its_absence():
    _, rnn = models()
    numbers = sequences()
    hidden = numbers.clone()
    hidden[0, 2, 1] = torch.nan
    before, after = rnn(numbers), rnn(hidden)
    assert not torch.allclose(before[0, 2:], after[0, 2:])
    torch.testing.assert_close(before[1:], after[1:])
    targets = sequences()[..., :2]
    loss = value_loss(before, targets)
    targets[1, 1, 0] = torch.nan
    assert not torch.equal(loss, value_loss(before, targets))
    assert value_loss(before, torch.full_like(targets, torch.nan)) == 0


@pytest.mark.parametrize("encoder", ["causal", "bidirectional"])
@pytest.mark.parametrize("padding", ["mask", "void"])
def test_a_memory_depends_on_its_past_alone(encoder, padding):
    teacher, _ = models("transformer", encoder, padding=padding)
    numbers = sequences(rows=2, steps=6)
    whole = teacher.encode(numbers)
    changed = numbers.clone()
    changed[:, 4:] = 9.0
    torch.testing.assert_close(teacher.encode(changed)[:, :4], whole[:, :4])
    assert not torch.allclose(teacher.encode(changed)[:, 4], whole[:, 4])
    changed = numbers.clone()
    changed[:, 0] = 9.0  # one layer sees four steps back, the causal encoder's two layers seven
    reach = 4 if encoder == "bidirectional" else 6
    assert not torch.allclose(teacher.encode(changed)[:, 3], whole[:, 3])
    torch.testing.assert_close(teacher.encode(changed)[:, reach:], whole[:, reach:])


def test_futures_hold_the_numbers_that_follow_and_none_beyond_the_end():
    inputs = torch.arange(5.0)[None, :, None].expand(1, 5, 1)
    batch = Batch(inputs, inputs + 1)
    window = gather_window(batch, torch.tensor([[1, 3]]), 3)
    assert window.future_targets[0, 0, :, 0].tolist() == [2, 3, 4]
    assert window.future_inputs[0, 0, :, 0].tolist() == [2, 3]
    assert window.future_targets[0, 1, :2, 0].tolist() == [4, 5]
    assert window.future_targets[0, 1, 2].isnan().all()


def test_targets_are_the_next_numbers_unless_given():
    _, rnn = models()
    batch = memtrain.BPTT(rnn).check_batch(numbers := sequences(), None)
    assert torch.equal(batch.targets[:, :-1], numbers[:, 1:, :2])
    assert batch.targets[:, -1].isnan().all()


@pytest.mark.parametrize(
    ("kind", "unroller"),
    [("gru", UnrolledGRU), ("lstm", UnrolledLSTM), ("transformer", FusedUnroll)],
)
def test_unrolled_at_once_equals_step_by_step(kind, unroller):
    _, plain = models(kind)
    fast = copy.deepcopy(plain)
    loops(fast, unroller=unroller())
    numbers, found = sequences(missing=0.2), []
    for rnn in (plain, fast):
        memories = rnn.unroll(numbers)
        (memories * torch.linspace(-1, 1, memories.shape[-1])).sum().backward()
        gradients = {n: p.grad for n, p in rnn.cell.named_parameters()}
        found.append((memories.detach(), gradients))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)


def test_steps_equal_the_whole_sequence():
    _, rnn = models("lstm")
    numbers, memory, steps = sequences(), rnn.empty_memory(3), []
    for t in range(7):
        output, memory = rnn.step(memory, numbers[:, t])
        steps.append(output)
    torch.testing.assert_close(torch.stack(steps, 1), rnn(numbers))


def test_published_and_own_cells_read_numbers():
    cell = memtrain.wrap(nn.LSTMCell(8, 16), values=VALUES)
    assert memtrain.check_cell(cell, values=VALUES) is cell
    rnn = memtrain.RNN(cell, values=VALUES, width=16, decoder_layers=1, heads=2, head_dim=8)
    assert rnn(sequences()).shape == (3, 7, VALUES.outputs)
    assert "3 numbers to 2 (gaussian)" in repr(rnn)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda rnn: rnn(torch.zeros(2, 5, dtype=torch.long)), "must be a tensor of floats"),
        (lambda rnn: rnn(torch.zeros(2, 5, 4)), "must have shape (B, T, 3), not (2, 5, 4)"),
        (lambda rnn: rnn(torch.full((2, 5, 3), torch.inf)), "contains infinity"),
        (lambda rnn: rnn.step(rnn.empty_memory(2), torch.zeros(2, 4)), "(2, 3), not (2, 4)"),
        (
            lambda rnn: memtrain.BPTT(rnn)(
                torch.zeros(2, 5, 3), targets=torch.full((2, 5, 2), torch.nan)
            ),
            "NaN everywhere",
        ),
        (lambda rnn: memtrain.BPTT(rnn)(torch.zeros(2, 1, 3)), "at least 2 steps"),
        (lambda rnn: Values(features=1, targets=2), "must be at most features=1"),
        (lambda rnn: Values(features=0), "must be a whole number above 0"),
        (lambda rnn: memtrain.Teacher(vocab_size=3, values=VALUES), "must be left out"),
        (lambda rnn: memtrain.make_cell("gru"), "values=memtrain.Values(...)"),
        (
            lambda rnn: memtrain.SMT(models(values=Values(features=3))[0], rnn),
            "they must be equal",
        ),
    ],
)
def test_mistakes_are_named(call, part):
    _, rnn = models()
    with pytest.raises(MemtrainError) as caught:
        call(rnn)
    assert part in str(caught.value)
