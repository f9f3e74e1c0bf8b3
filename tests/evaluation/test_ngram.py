"""Count models against counting by hand."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from conftest import seeded
from memtrain.data.task import Corpus
from memtrain.evaluation import ngram as counts
from memtrain.evaluation.ngram import STRENGTHS, count_baselines
from memtrain.shapes import IGNORE_INDEX

V, WIDTH, HEIGHT = 5, 4, 3
SIZE = WIDTH * HEIGHT
AROUND = ((0, -1), (-1, 0), (-1, 1), (-1, -1))


def context_of(row: list[int], place: int, width: int | None) -> list[int | None]:
    """The neighbours of one token, nearest first; None where there is none."""
    if width is None:
        return [row[place - back] if place >= back else None for back in (1, 2, 3)]
    first = place - place % SIZE
    y, x = divmod(place % SIZE, width)
    found = []
    for down, right in AROUND:
        inside = y + down >= 0 and 0 <= x + right < width
        found.append(row[first + (y + down) * width + x + right] if inside else None)
    return found


def by_hand(train: list[int], rows: list[list[int]], first: int, width: int | None) -> list[float]:
    """The loss of each order, strength by strength, with dictionaries."""
    orders = 4 if width is None else 5
    seen, pairs = Counter(), Counter()
    for place, token in enumerate(train):
        context = context_of(train, place, width)
        for order in range(orders):
            seen[order, *context[:order]] += 1
            pairs[order, *context[:order], token] += 1
    predicted = [
        (context_of(row, t, width), row[t]) for row in rows for t in range(first, len(row))
    ]
    lower = [1 / V] * len(predicted)
    losses = []
    for order in range(orders):
        best = (math.inf, lower)
        for strength in STRENGTHS:
            mixed = [
                (pairs[order, *context[:order], token] + strength * below)
                / (seen[order, *context[:order]] + strength)
                for (context, token), below in zip(predicted, lower, strict=True)
            ]
            best = min(best, (-sum(map(math.log, mixed)) / len(mixed), mixed))
        losses.append(best[0])
        lower = best[1]
    return [losses[0], losses[1], losses[-1]]


def streams(width: int | None) -> tuple[Corpus, Tensor]:
    """Tokens that follow a noisy rule, so that context helps."""
    noise = (torch.rand(60 * SIZE, generator=seeded()) < 0.3) * torch.randint(
        V, (60 * SIZE,), generator=seeded(1)
    )
    tokens = (torch.arange(60 * SIZE) // 2 + noise) % V
    length = SIZE if width else None
    corpus = Corpus(tokens[: 50 * SIZE].to(torch.uint8), V, "thing", width, length)
    return corpus, tokens[50 * SIZE :].view(5, 2 * SIZE)


@pytest.mark.parametrize("width", [None, WIDTH], ids=["stream", "pictures"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("way", ["table", "sorted", "fingerprint", "blocks"])
def test_ngram_losses_equal_counting_by_hand(width, first, way, monkeypatch):
    if way in ("sorted", "fingerprint"):
        monkeypatch.setattr(counts, "TABLE", 0)
    if way == "fingerprint":
        monkeypatch.setattr(counts, "EXACT", 0)
    if way == "blocks":
        monkeypatch.setattr(counts, "BLOCK", 37)
    corpus, rows = streams(width)
    targets = rows.clone()
    targets[:, :first] = IGNORE_INDEX
    found = count_baselines(corpus, rows, targets)
    expected = by_hand(corpus.block(0, len(corpus.tokens)).tolist(), rows.tolist(), first, width)
    assert [baseline.nats for baseline in found] == pytest.approx(expected, abs=1e-9)
    assert [baseline.bits for baseline in found] == pytest.approx(
        [nats / math.log(2) for nats in expected]
    )
    assert {baseline.fitted_tokens for baseline in found} == {50 * SIZE}
    last = "left and three above" if width else "previous three"
    assert [baseline.name for baseline in found] == [
        "counts, order 0",
        "counts, previous thing",
        f"counts, {last}",
    ]


def test_a_limit_counts_blocks_from_all_over_the_stream(monkeypatch):
    monkeypatch.setattr(counts, "BLOCK", 10)
    tokens = torch.zeros(100, dtype=torch.uint8)
    tokens[-10:] = 1  # only the last block holds it
    corpus = Corpus(tokens, 2, "thing")
    rows = torch.ones(1, 4, dtype=torch.long)
    few = count_baselines(corpus, rows, rows, limit=20)
    assert few[0].fitted_tokens == 20
    assert few[0].nats == pytest.approx(math.log(2), abs=0.02)  # the first and the last block
    assert count_baselines(corpus, rows, rows, limit=100)[0].fitted_tokens == 100


def test_tokens_of_16_bits_are_counted():
    tokens = torch.tensor([65535, 3, 65535, 3, 65535, 3], dtype=torch.uint16)
    rows = torch.tensor([[65535, 3, 65535, 3]])
    found = count_baselines(Corpus(tokens, 2**16, "thing"), rows, rows)
    assert found[1].nats < found[0].nats < math.log(2**16)
