"""The recipe of series."""

import pytest

from memtrain.config import Series
from memtrain.errors import MemtrainError
from memtrain.models.build import build_rnn
from memtrain.recipes import CHOICES, STREAMS, recipe
from memtrain.shapes import Values


def test_it_comes_with_every_cell_and_method():
    assert CHOICES["series"] == ("method", "cell") and "series" not in STREAMS
    plain = recipe("series")
    assert plain.data == Series() and plain.cell.kind == "transformer"
    by_bptt = recipe("series", method="bptt")
    assert by_bptt.name == "series-bptt" and not by_bptt.smt.steps and by_bptt.cell == plain.cell
    for kind in ("gru", "lstm", "mlp"):
        config = recipe("series", cell=kind)
        assert config.teacher.normalize_memory == (kind == "mlp")
        sizes = [
            sum(p.numel() for p in build_rnn(one, Values(features=2)).parameters())
            for one in (config, plain)
        ]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.35)
    with pytest.raises(MemtrainError, match="did you mean bptt"):
        recipe("series", method="bppt")
    with pytest.raises(MemtrainError, match="series has one size"):
        recipe("series", "tiny")
