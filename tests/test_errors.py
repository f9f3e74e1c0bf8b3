"""Messages that a person can read."""

from memtrain.errors import MAX_MESSAGE, CheckpointError, MemtrainError


def test_long_quoted_values_are_shortened():
    for kind in (MemtrainError, CheckpointError):
        said = str(kind(f"name={'a' * 100_000!r}: must be shorter"))
        assert said.startswith("name='aaa") and said.endswith("aaa': must be shorter")
        assert " [...] " in said and len(said) < MAX_MESSAGE + 10
    assert str(MemtrainError("width=0: must be at least 1")) == "width=0: must be at least 1"
