"""Messages that a person can read."""

import pickle

from memtrain.errors import (
    MAX_MESSAGE,
    MAX_NAMES,
    CheckpointError,
    MemtrainError,
    did_you_mean,
)


def test_long_quoted_values_are_shortened():
    for kind in (MemtrainError, CheckpointError):
        message = str(kind(f"name={'a' * 100_000!r}: must be shorter"))
        assert message.startswith("name='aaa") and message.endswith("aaa': must be shorter")
        assert " [...] " in message and len(message) < MAX_MESSAGE + 10
    assert str(MemtrainError("width=0: must be at least 1")) == "width=0: must be at least 1"


def test_the_command_line_has_its_own_remedy_where_one_is_given():
    plain = MemtrainError("width=0: must be at least 1")
    assert plain.command_line == str(plain)
    error = CheckpointError("x: gone; Run.open", f"x: {'a' * 1000}\x1b; memtrain resume")
    assert str(error) == "x: gone; Run.open"
    assert len(error.command_line) < MAX_MESSAGE + 10 and "\\x1b" in error.command_line
    sent = pickle.loads(pickle.dumps(error))  # to another process
    assert (str(sent), sent.command_line) == (str(error), error.command_line)


def test_an_unknown_name_among_very_many_lists_those_that_are_alike():
    assert did_you_mean("gro", ["gru", "mlp"]) == "did you mean gru? (one of gru, mlp)"
    assert did_you_mean("xyz", ["gru", "mlp"]) == "must be one of gru, mlp"
    many = [f"run-{number}" for number in range(2_000)]
    found = did_you_mean("run-77x", many)
    assert found.startswith("did you mean run-77? (one of 2,000 names, such as ")
    assert found.count("run-") == 1 + MAX_NAMES // 4
