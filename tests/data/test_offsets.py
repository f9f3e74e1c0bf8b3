"""Windows begin apart, each place as often as any other."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import seeded
from memtrain.data import offsets as module
from memtrain.data.offsets import (
    LONG,
    Offsets,
    beginnings,
    of_long_documents,
    spread_out,
    spread_out_beside,
)
from memtrain.errors import MemtrainError

STARTS = np.array([0, 5, 7, 17])  # documents of 5, 2, 10 and 3 tokens
TOKENS = 20
CPU = torch.device("cpu")


def make(size: int, cross: bool, begins: list[int] | None = None) -> Offsets:
    given_begins = None if begins is None else np.array(begins, np.int64)
    return Offsets(STARTS, TOKENS, size, cross, CPU, given_begins)


PLACES = [
    (4, True, list(range(17))),
    (20, True, [0]),
    (4, False, [0, 1, 7, 8, 9, 10, 11, 12, 13]),
    (3, False, [0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 17]),
    (10, False, [7]),
]


@pytest.mark.parametrize(("size", "cross", "expected"), PLACES)
@pytest.mark.parametrize("count", [5, 6000])
def test_windows_begin_anywhere_that_has_room_each_as_often(size, cross, expected, count):
    offsets, generator = make(size, cross), seeded()
    drawn = torch.cat([offsets.draw(count, generator) for _ in range(6000 // count)])
    begins, counts = drawn.unique(return_counts=True)
    assert begins.tolist() == expected and offsets.places == len(expected)
    share = 6000 / len(begins)
    assert all(abs(count - share) < 6 * share**0.5 for count in counts.tolist())


@pytest.mark.parametrize(
    ("size", "cross", "expected"),
    [(3, True, [0, 5, 7, 17]), (4, True, [0, 5, 7]), (4, False, [0, 7]), (20, True, [0])],
)
def test_windows_at_starts_begin_documents_that_have_room(size, cross, expected):
    offsets, generator = make(size, cross), seeded()
    batches = [offsets.draw(offsets.places, generator, 4).tolist() for _ in range(50)]
    assert all(sorted(batch[: len(expected)]) == expected for batch in batches)
    assert all(len(set(batch)) == offsets.places for batch in batches)


@pytest.mark.parametrize("cross", [True, False])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    size=st.integers(1, 12),
    count=st.integers(1, 80),
    starting=st.integers(0, 80),
    seed=st.integers(0, 2**32),
)
def test_no_window_comes_twice_while_there_are_others(cross, lengths, size, count, starting, seed):
    tokens = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    if size > (tokens if cross else max(lengths)):
        return
    offsets = Offsets(starts, tokens, size, cross, CPU)
    starting = min(starting, count)
    drawn = offsets.draw(count, seeded(seed), starting).tolist()
    ends = [*starts[1:], tokens]
    room = [
        place
        for start, end in zip(starts, ends, strict=True)
        for place in range(start, min(end, tokens - size + 1) if cross else end - size + 1)
    ]
    times = [drawn.count(place) for place in room]
    assert sum(times) == count == len(drawn)
    assert max(times) - min(times) <= 1  # distinct, and round by round where there are too few
    at_starts = sorted(set(starts.tolist()) & set(room))
    documents = drawn[: min(starting, len(at_starts))]
    assert set(documents) <= set(at_starts) and len(set(documents)) == len(documents)


def test_draws_that_are_distinct_stay_as_they_are():
    """So batches of a corpus that is not tiny are what uniform draws give, nearly always."""
    offsets = Offsets(np.arange(0, 10**6, 100), 10**6, 50, True, CPU)
    places = torch.randint(10**6 - 49, (64,), generator=(chance := seeded(3)))
    starts = torch.randint(10**4, (16,), generator=chance) * 100
    expected = torch.cat([starts, places[16:]])
    assert len(expected.unique()) == 64
    assert torch.equal(offsets.draw(64, seeded(3), 16), expected)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 3), (3, 4), (2, 5), (4, 4)])
def test_every_number_is_exactly_as_likely_in_every_row(count, size):
    """Over all draws there are, each equally likely."""
    drawn = torch.tensor(list(product(range(size), repeat=count)))
    spread = torch.stack([spread_out(row, size) for row in drawn])
    assert all(len(set(row)) == count for row in spread.tolist())
    for column in spread.T:
        assert torch.bincount(column, minlength=size).tolist() == [len(drawn) // size] * size


@given(st.data())
def test_numbers_beside_taken_ones_are_free_and_distinct(data):
    size = data.draw(st.integers(1, 30))
    taken = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1))
    below = st.integers(0, size - 1)
    drawn = data.draw(st.lists(below, min_size=1, max_size=size - len(taken)))
    rows = torch.tensor(drawn), torch.tensor(taken, dtype=torch.long)
    found = spread_out_beside(*rows, size).tolist()
    assert len({*found, *taken}) == len(found) + len(taken) and max(found) < size
    if len({*drawn, *taken}) == len(drawn) + len(taken):
        assert found == drawn


# ------------------------------------------------------------------------------- beginnings


def begins(content: bytes, starts: list[int], rows: int, **kind: bool) -> list[int]:
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    kind = {"text": True, "pictures": False, **kind}
    return beginnings(np.array(starts), tokens, rows, **kind).tolist()


def test_of_many_documents_the_starts_are_beginnings():
    assert begins(b"a\nb\nc\nd\n", [0, 2, 4, 6], 4) == [0, 2, 4, 6]
    assert begins(b"abcdefgh", [0, 4], 2, text=False) == [0, 4]


def test_of_one_text_every_line_is_a_beginning_with_the_line_end_before_it():
    assert begins(b"ab\ncd\nef\n", [0], 3) == [0, 2, 5, 8]


def test_of_fewer_documents_than_rows_lines_are_beginnings_too_or_rows_are_fewer():
    assert begins(b"ab\ncd\nef\ngh", [0, 6], 4) == [0, 2, 5, 6, 8]
    assert begins(b"abcdefghijk", [0, 6], 4) == [0, 6]
    assert begins(b"abcdefghijk", [0, 6], 4, text=False, pictures=True) == [0, 6]


def test_a_stream_without_lines_begins_anywhere():
    assert begins(b"abcdefgh", [0], 3) == begins(b"a\ncdefgh", [0], 3) == []
    assert begins(b"ab\ncd\nef\n", [0], 3, text=False) == []


def test_a_handful_of_long_documents_is_not_begun_over_and_over(monkeypatch):
    monkeypatch.setattr(module, "LONG", 6)
    books = b"title\n" + b"x" * 9 + b"\nmore\n" + b"y" * 9 + b"\n"
    assert begins(books, [0, 16], 2) == [0, 5, 15, 16, 20, 30]
    assert begins(books.replace(b"\n", b" "), [0, 16], 2) == []
    assert begins(books, [0, 16], 2, text=False) == []
    assert begins(books, [0, 16], 2, text=False, pictures=True) == [0, 16]
    assert begins(b"title\n" + b"x" * 80, [0], 2) == []  # one line of two is not worth it either
    monkeypatch.setattr(module, "HANDFUL", 2)
    assert begins(books, [0, 16], 2) == [0, 16]


def test_stories_and_pictures_are_not_long_documents():
    assert not of_long_documents(np.arange(0, 900 * 500, 900), 900 * 500)
    assert not of_long_documents(np.arange(0, 784 * 60, 784), 784 * 60)
    assert of_long_documents(np.array([0, 10]), 3 * LONG)


# -------------------------------------------------------------------------------------- rest


def test_windows_that_no_document_holds_are_refused_in_words():
    with pytest.raises(MemtrainError, match="window of 11 tokens, the longest has 10"):
        make(11, False)


def test_a_generator_may_live_elsewhere_than_the_stream():
    """ "meta" stands for a GPU."""
    offsets = Offsets(np.array([0, 10]), 30, 5, True, torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    assert offsets.draw(3, generator, 1).device.type == "meta"


def test_drawing_makes_no_decision_on_the_host():
    """Which a CUDA graph could not replay: on "meta", a tensor has no values to decide by."""
    offsets = Offsets(np.arange(0, 90, 10), 100, 5, False, torch.device("meta"))
    assert offsets.draw(40, seeded(), 6).shape == (40,)
