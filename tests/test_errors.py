"""Messages that a person can read."""

import pickle

from memtrain.errors import MAX_MESSAGE, CheckpointError, MemtrainError


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
