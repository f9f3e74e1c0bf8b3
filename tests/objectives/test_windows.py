import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_tokens
from memtrain.objectives.futures import gather_window, target_positions
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


def test_a_target_nobody_asks_for_stays_ignored():
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
def test_asked_positions_hold_every_target_of_a_row_once(data, rows, length):
    target = st.sampled_from([IGNORE_INDEX, IGNORE_INDEX, 0, 1, 2])
    row = st.lists(target, min_size=length, max_size=length)
    targets = data.draw(st.lists(row, min_size=rows, max_size=rows))
    positions, chosen = target_positions(torch.tensor(targets))
    most = max(sum(y != IGNORE_INDEX for y in row) for row in targets)
    assert positions.shape == chosen.shape == (rows, max(1, most))
    for row, places, values in zip(targets, positions.tolist(), chosen.tolist(), strict=True):
        assert len(set(places)) == len(places)
        assert values == [row[place] for place in places]
        asked = {place for place, y in enumerate(row) if y != IGNORE_INDEX}
        assert asked <= set(places)
