import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from conftest import gradients, random_batch, random_tokens, seeded, tiny_rnn, tiny_teacher
from memtrain.losses import decode_loss
from memtrain.objectives.futures import (
    decode_futures,
    gather_window,
    readout_loss,
    target_positions,
)
from memtrain.shapes import IGNORE_INDEX, Batch


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    future_length=st.integers(1, 12),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_futures_equal_a_loop_over_rows_steps_and_targets(rows, length, future_length, count, data):
    step = st.integers(-3, length + 2)  # a future may lie beyond either end, in part or whole
    steps = data.draw(
        st.lists(st.lists(step, min_size=count, max_size=count), min_size=rows, max_size=rows)
    )
    # Every token of the batch is another number, so that no place can stand for another.
    inputs = torch.arange(rows * length).reshape(rows, length)
    targets = 1000 + inputs
    window = gather_window(Batch(inputs, targets), torch.tensor(steps), future_length)

    due = min(future_length, length)
    assert window.future_targets.shape == (rows, count, due)
    assert window.future_inputs.shape == (rows, count, due - 1)
    for row in range(rows):
        for column, t in enumerate(steps[row]):
            for k in range(due):
                # y_t ... y_{t+F-1}, as far as they lie inside the sequence
                expected = int(targets[row, t + k]) if 0 <= t + k < length else IGNORE_INDEX
                assert window.future_targets[row, column, k] == expected
            for k in range(due - 1):
                # x_{t+1} ...: the k-th is read before target k+1 is due
                if 0 <= t + 1 + k < length:
                    assert window.future_inputs[row, column, k] == inputs[row, t + 1 + k]


def test_the_example_of_the_copy_task():
    x, y = [3, 4, 1, 2, 0, 0, 0, 0], [-100, -100, -100, -100, 2, 1, 4, 3]
    batch = Batch(torch.tensor([x]), torch.tensor([y]))
    window = gather_window(batch, torch.tensor([[3, 6]]), 4)
    assert window.future_targets.tolist() == [[[-100, 2, 1, 4], [4, 3, -100, -100]]]
    assert window.future_inputs[0, 0].tolist() == [0, 0, 0]


def test_ignored_targets_stay_ignored():
    inputs = random_tokens(2, 6)
    batch = Batch(inputs, torch.full((2, 6), IGNORE_INDEX))
    window = gather_window(batch, torch.tensor([[0, 5], [2, 3]]), 3)
    assert (window.future_targets == IGNORE_INDEX).all()


def test_inputs_beyond_the_end_are_valid_tokens():
    inputs = random_tokens(2, 6)
    window = gather_window(Batch(inputs, inputs), torch.tensor([[5], [4]]), 6)
    assert (window.future_inputs >= 0).all()
    assert (window.future_inputs <= inputs.max()).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), length=st.integers(1, 6))
def test_target_positions_hold_every_target_of_a_row_once(data, rows, length):
    target = st.sampled_from([IGNORE_INDEX, IGNORE_INDEX, 0, 1, 2])
    row = st.lists(target, min_size=length, max_size=length)
    targets = data.draw(st.lists(row, min_size=rows, max_size=rows))
    positions, chosen = target_positions(torch.tensor(targets))
    most = max(sum(y != IGNORE_INDEX for y in row) for row in targets)
    assert positions.shape == chosen.shape == (rows, max(1, most))
    for row, places, values in zip(targets, positions.tolist(), chosen.tolist(), strict=True):
        assert len(set(places)) == len(places)
        assert values == [row[place] for place in places]
        valid = {place for place, y in enumerate(row) if y != IGNORE_INDEX}
        assert valid <= set(places)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


class TestReadoutLoss:
    def test_equals_the_loss_of_reading_every_memory(self):
        rnn, batch = tiny_rnn(), random_batch(3, 5, target_rate=0.4)
        memories = normal(3, 5, 2, 16)
        expected = decode_loss(rnn.predict(memories), batch.targets)
        assert_close(readout_loss(rnn, memories, batch.targets), expected)

    def test_loss_is_zero_with_a_finite_gradient_without_targets(self):
        rnn, memories = tiny_rnn(), normal(3, 5, 2, 16).requires_grad_()
        loss = readout_loss(rnn, memories, torch.full((3, 5), IGNORE_INDEX))
        assert loss.item() == 0
        assert not any(g.any() or g.isnan().any() for g in gradients(loss, rnn.parameters()))
        loss.backward()
        assert memories.grad is not None and not memories.grad.any()


class TestFuture:
    def test_the_next_loss_is_that_of_the_first_target_of_every_future(self):
        teacher, batch = tiny_teacher(), random_batch(3, 8)
        batch.targets[:, ::3] = IGNORE_INDEX
        steps = torch.tensor([[0, 4, 7], [1, 3, 5], [2, 6, 7]])
        memory = teacher.encode(batch.inputs, steps)
        decoded = decode_futures(teacher, batch, memory, steps, 4)
        logits = [teacher.predict(memory[row, None, k])[0] for row in range(3) for k in range(3)]
        losses = [
            F.cross_entropy(one, torch.tensor(target)).item()
            for one, target in zip(
                logits, batch.targets.gather(1, steps).flatten().tolist(), strict=True
            )
            if target != IGNORE_INDEX
        ]
        assert 0 < len(losses) < 9
        assert decoded.next_loss().item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        assert decoded.loss().item() != pytest.approx(decoded.next_loss().item(), abs=1e-3)
