"""From a data config to its task."""

import sys
import types

import pytest

from memtrain.config import Custom
from memtrain.data.build import build_task
from memtrain.errors import MemtrainError


class Choosy:
    """A task that cannot be made."""

    def __init__(self, size: int = 0) -> None:
        raise KeyError(f"size {size}")


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "KeyError: 'size 0'"), ({"width": 3}, "TypeError: .*unexpected keyword argument")],
)
def test_a_task_of_the_users_that_cannot_be_made_is_told_in_words(monkeypatch, options, said):
    module = types.ModuleType("choosy")
    module.__dict__["Choosy"] = Choosy
    monkeypatch.setitem(sys.modules, "choosy", module)
    with pytest.raises(MemtrainError, match=f"data.path=choosy:Choosy: its making fails: {said}"):
        build_task(Custom(path="choosy:Choosy", options=options))
