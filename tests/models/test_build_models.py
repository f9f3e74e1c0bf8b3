"""Models of a config: their size is known before memory is taken."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import TINY
from memtrain.config import CELLS, CellConfig, DMTConfig, SMTConfig, TeacherConfig
from memtrain.errors import MemtrainError
from memtrain.models import build
from memtrain.models.build import build_models, build_rnn, most_parameters

few = st.integers(1, 4)


@settings(max_examples=40, deadline=None)
@given(few, few, few, few, few, few, st.sampled_from(CELLS), st.integers(2, 300))
def test_the_rough_count_is_never_too_low(tokens, dim, width, heads, pairs, layers, kind, vocab):
    cell = CellConfig(
        kind=kind,
        memory_tokens=2 * tokens if kind == "lstm" else tokens,
        memory_dim=dim,
        width=width,
        layers=layers,
        heads=heads,
        head_dim=2 * pairs,
    )
    teacher = TeacherConfig(
        width=width, encoder_layers=layers, decoder_layers=layers, heads=heads, head_dim=2 * pairs
    )
    alone = {"smt": SMTConfig(), "dmt": DMTConfig()} if kind == "attention" else {}
    config = replace(TINY, cell=cell, teacher=teacher, **alone)
    models = [model for model in build_models(config, vocab) if model is not None]
    count = sum(p.numel() for model in models for p in model.parameters())
    assert count <= most_parameters(config, vocab)


def test_models_that_may_be_too_large_are_counted_exactly(monkeypatch):
    count = sum(p.numel() for m in build_models(TINY, 9) if m for p in m.parameters())
    assert 4 * count < 4 * most_parameters(TINY, 9)
    monkeypatch.setattr(build, "_memory", lambda: 4 * count)
    build_models(TINY, 9)  # it just fits
    monkeypatch.setattr(build, "_memory", lambda: 4 * count - 1)
    with pytest.raises(MemtrainError, match=f"the models have {count:,} parameters"):
        build_models(TINY, 9)
    build_rnn(TINY, 9)  # without the teacher it does


def test_building_does_not_change_the_global_rng():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, other = build_rnn(TINY, 9), build_models(TINY, 9)[0]
    assert torch.equal(torch.rand(2), expected)
    weights = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)  # the config's seed decides


def test_a_cell_passed_in_eval_mode_trains_in_training_mode():
    """An evaluation would switch it to that, so a run and a resumed one would differ."""
    cell = build_rnn(TINY, 4).cell.eval()
    assert build_rnn(TINY, 4, cell).training and cell.training
