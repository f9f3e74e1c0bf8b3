"""Messages that a person can read."""

from memtrain.errors import MAX_MESSAGE, CheckpointError, MemtrainError


def test_long_quoted_values_are_shortened():
    for kind in (MemtrainError, CheckpointError):
        message = str(kind(f"name={'a' * 100_000!r}: must be shorter"))
        assert message.startswith("name='aaa") and message.endswith("aaa': must be shorter")
        assert " [...] " in message and len(message) < MAX_MESSAGE + 10
    assert str(MemtrainError("width=0: must be at least 1")) == "width=0: must be at least 1"
