import numpy as np
import pytest
import torch

from conftest import seeded
from memtrain.data.offsets import Offsets
from memtrain.errors import MemtrainError

STARTS = np.array([0, 5, 7, 17])  # documents of 5, 2, 10 and 3 tokens
TOKENS = 20


def drawn(size: int, cross: bool, at_starts: bool = False) -> torch.Tensor:
    offsets = Offsets(STARTS, TOKENS, size, cross, torch.device("cpu"))
    draw = offsets.at_starts if at_starts else offsets.anywhere
    return draw(6000, seeded())


@pytest.mark.parametrize(
    ("size", "cross", "expected"),
    [
        (4, True, range(17)),
        (20, True, [0]),
        (4, False, [0, 1, 7, 8, 9, 10, 11, 12, 13]),
        (3, False, [0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 17]),
        (10, False, [7]),
    ],
)
def test_windows_begin_anywhere_that_has_room_each_as_often(size, cross, expected):
    begins, counts = drawn(size, cross).unique(return_counts=True)
    assert begins.tolist() == list(expected)
    share = 6000 / len(begins)
    assert all(abs(count - share) < 6 * share**0.5 for count in counts.tolist())


@pytest.mark.parametrize(
    ("size", "cross", "expected"),
    [(3, True, [0, 5, 7, 17]), (4, True, [0, 5, 7]), (4, False, [0, 7]), (20, True, [0])],
)
def test_windows_at_starts_begin_documents_that_have_room(size, cross, expected):
    assert drawn(size, cross, at_starts=True).unique().tolist() == expected


def test_windows_that_no_document_holds_are_refused_in_words():
    with pytest.raises(MemtrainError, match="window of 11 tokens, the longest has 10"):
        Offsets(STARTS, TOKENS, 11, False, torch.device("cpu"))


def test_a_generator_may_live_elsewhere_than_the_stream():
    """ "meta" stands for a GPU."""
    offsets = Offsets(np.array([0, 10]), 30, 5, True, torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    assert offsets.anywhere(3, generator).device.type == "meta"
    assert offsets.at_starts(3, generator).device.type == "meta"
