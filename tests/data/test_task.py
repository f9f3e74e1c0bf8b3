import random
import sys
import textwrap
import types

import numpy as np
import pytest
import torch

from memtrain.config import Custom
from memtrain.data.task import Task, build_task, check_task
from memtrain.errors import MemtrainError
from memtrain.shapes import IGNORE_INDEX, Batch


class Constant(Task):
    """A task that returns the given batches."""

    def __init__(self, inputs, targets=None, *, vocab_size=4, sequence_length=5):
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.batch = Batch(inputs, inputs.clone() if targets is None else targets)

    def sample(self, count, generator):
        return self.batch


def zeros(*shape, dtype=torch.long):
    return torch.zeros(shape, dtype=dtype)


def with_one(value):
    tokens = zeros(3, 5)
    tokens[1, 2] = value
    return tokens


def refusal(task):
    with pytest.raises(MemtrainError) as caught:
        check_task(task)
    return str(caught.value)


def test_the_docstrings_example_keeps_the_contract():
    _, example = (Task.__doc__ or "").split("implements `sample`:\n")
    names = {"Task": Task, "Batch": Batch, "torch": torch}
    exec(textwrap.dedent(example), names)
    parity = names["Parity"]()  # pyright: ignore[reportCallIssue]
    assert check_task(parity) is parity


def test_a_task_may_leave_targets_out():
    task = Constant(zeros(3, 5), with_one(IGNORE_INDEX))
    assert check_task(task) is task


def test_objects_that_are_not_tasks_are_refused():
    assert refusal(3) == "int: a task must be a subclass of memtrain.Task"


@pytest.mark.parametrize("field", ["vocab_size", "sequence_length"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", None])
def test_a_number_that_is_not_whole_and_positive_is_refused(field, value):
    task = Constant(zeros(3, 5), **{field: value})
    hint = "; or values=memtrain.Values(...)" if field == "vocab_size" else ""
    assert refusal(task) == f"Constant.{field}={value!r}: must be a whole number above 0{hint}"


def test_an_unset_number_is_refused():
    class Unset(Task):
        vocab_size = 4

        def sample(self, count, generator):
            raise AssertionError("the numbers are checked first")

    assert refusal(Unset()) == "Unset.sequence_length=None: must be a whole number above 0"


def test_a_sample_must_be_a_batch():
    class Pair(Task):
        vocab_size, sequence_length = 4, 5

        def sample(self, count, generator):
            return zeros(count, 5), zeros(count, 5)  # pyright: ignore

    assert refusal(Pair()) == (
        "Pair.sample: must return memtrain.Batch(inputs, targets), not tuple"
    )


@pytest.mark.parametrize("shape", [(2, 5), (3, 4)])
def test_a_wrong_shape_is_refused(shape):
    assert refusal(Constant(zeros(*shape))) == (
        "Constant.sample(3): inputs must be int64 of shape (3, 5), "
        f"not torch.int64 of shape {shape}"
    )


def test_inputs_of_a_wrong_dtype_are_refused():
    assert refusal(Constant(zeros(3, 5, dtype=torch.int32))) == (
        "Constant.sample(3): inputs must be int64 of shape (3, 5), not torch.int32 of shape (3, 5)"
    )


def test_targets_of_a_wrong_dtype_are_refused():
    assert refusal(Constant(zeros(3, 5), zeros(3, 5, dtype=torch.int32))) == (
        "Constant.sample(3): targets must be int64 of shape (3, 5), not torch.int32 of shape (3, 5)"
    )


@pytest.mark.parametrize("value", [4, -1, IGNORE_INDEX])
def test_an_input_outside_the_vocabulary_is_refused(value):
    assert refusal(Constant(with_one(value), zeros(3, 5))) == (
        f"Constant.sample: inputs contain {value}, outside 0..3"
    )


@pytest.mark.parametrize("value", [4, -1])
def test_a_target_outside_the_vocabulary_is_refused(value):
    assert refusal(Constant(zeros(3, 5), with_one(value))) == (
        f"Constant.sample: targets contain {value}, outside 0..3 and not IGNORE_INDEX (-100)"
    )


@pytest.mark.parametrize("role", ["inputs", "targets"])
def test_tokens_that_are_not_a_tensor_are_refused(role):
    task = Constant(zeros(3, 5))
    # Not through the constructor, which under pytest checks types; a user's does not.
    object.__setattr__(task.batch, role, zeros(3, 5).tolist())
    assert refusal(task) == (
        f"Constant.sample(3): {role} must be a torch.Tensor, not list; torch.tensor(...) makes one"
    )


class Failing(Task):
    vocab_size, sequence_length = 4, 5

    def __init__(self, error):
        self.error = error

    def sample(self, count, generator):
        raise self.error


@pytest.mark.parametrize(
    "error, message",
    [
        (KeyError("words"), "KeyError: 'words'"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_an_exception_in_sample_is_one_line(error, message):
    assert refusal(Failing(error)) == f"Failing.sample(3, generator) raised {message}"


def test_a_memtrain_error_in_sample_is_unchanged():
    assert refusal(Failing(MemtrainError("words.txt: no such file"))) == "words.txt: no such file"


class Rare(Task):
    """Asks at the end of every `every`-th sequence."""

    vocab_size, sequence_length = 4, 5

    def __init__(self, every):
        self.every = every

    def sample(self, count, generator):
        targets = torch.full((count, 5), IGNORE_INDEX)
        targets[self.every - 1 :: self.every, -1] = 1
        return Batch(zeros(count, 5), targets)


def test_a_task_without_targets_is_refused():
    assert refusal(Rare(every=1000)) == (
        "Rare.sample(256): all targets are IGNORE_INDEX (-100), so there is nothing to learn; "
        "at least one must be in 0..3"
    )


def test_a_task_with_rare_targets_is_accepted():
    task = Rare(every=100)
    assert check_task(task) is task


def tokens_from(generator=None):
    return torch.randint(4, (3, 5), generator=generator)


class Drawing(Task):
    """Draws training sequences by `draw` and held-out ones by `draw_held_out`."""

    vocab_size, sequence_length = 4, 5

    def __init__(self, draw, draw_held_out=tokens_from):
        self.draw, self.draw_held_out = draw, draw_held_out

    def sample(self, count, generator):
        tokens = self.draw(generator)
        return Batch(tokens, tokens)

    def held_out(self, count, generator):
        tokens = self.draw_held_out(generator)
        return Batch(tokens, tokens)


SHUFFLED = torch.randint(4, (1000, 5), generator=torch.Generator().manual_seed(1))
CURSOR: list[int] = []


def next_rows(generator):
    """The rows after those of the last call, as a loader goes through its data."""
    CURSOR.append(3)
    return SHUFFLED[sum(CURSOR) : sum(CURSOR) + 3]


WITHOUT_THE_GENERATOR = {
    "torch": lambda generator: tokens_from(),
    "numpy": lambda generator: torch.from_numpy(np.random.randint(0, 4, (3, 5))),
    "python": lambda generator: torch.tensor([random.choices(range(4), k=5) for _ in range(3)]),
    "cursor": next_rows,
}


@pytest.mark.parametrize("draw", WITHOUT_THE_GENERATOR.values(), ids=list(WITHOUT_THE_GENERATOR))
def test_other_randomness_and_state_are_refused(draw):
    reason = "two calls with equally seeded generators differ, so a resumed run would differ"
    assert refusal(Drawing(draw)).startswith(f"Drawing.sample: {reason}")
    assert refusal(Drawing(tokens_from, draw)).startswith(f"Drawing.held_out: {reason}")


def test_held_out_sequences_keep_the_contract_too():
    assert refusal(Drawing(tokens_from, lambda _: zeros(3, 5) + 9)) == (
        "Drawing.held_out: inputs contain 9, outside 0..3"
    )
    task = Drawing(tokens_from)
    assert check_task(task) is task


def test_the_check_leaves_every_rng_as_it_was():
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    for draw in WITHOUT_THE_GENERATOR.values():
        refusal(Drawing(draw))
    assert random.getstate() == states[0] and repr(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_class_in_place_of_a_task_is_refused():
    assert refusal(Rare) == "Rare: is a class; pass an instance, Rare(...)"


class Choosy:
    """A task that cannot be made."""

    def __init__(self, size: int = 0) -> None:
        raise KeyError(f"size {size}")


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "KeyError: 'size 0'"), ({"width": 3}, "TypeError: .*unexpected keyword argument")],
)
def test_a_user_task_that_cannot_be_built_is_one_line(monkeypatch, options, message):
    module = types.ModuleType("choosy")
    module.__dict__["Choosy"] = Choosy
    monkeypatch.setitem(sys.modules, "choosy", module)
    with pytest.raises(MemtrainError, match=f"data.path=choosy:Choosy: cannot be built: {message}"):
        build_task(Custom(path="choosy:Choosy", options=options))


def test_the_old_name_of_held_out_images_still_works():
    class Old(Constant):
        def held_out_pictures(self, count, generator):
            return torch.zeros(count, 4, dtype=torch.long)

    with pytest.warns(DeprecationWarning, match="held_out_images"):
        task = check_task(Old(zeros(3, 5)))
    images = task.held_out_images(2, torch.Generator())
    assert images is not None and images.shape == (2, 4)
