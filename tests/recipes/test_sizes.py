"""Sizes are what they say."""

from dataclasses import replace

import pytest

from memtrain.config import Stream
from memtrain.errors import MemtrainError
from memtrain.models.build import build_rnn
from memtrain.models.teacher import Teacher
from memtrain.recipes import RECIPES, STREAMS, recipe
from memtrain.recipes.sizes import SIZES, describe_sizes


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_stated(name: str):
    config, size = recipe("text", name), SIZES[name]
    rnn = build_rnn(config, 256)
    memory = config.cell.memory_tokens, config.cell.memory_dim
    teacher = Teacher(config.teacher, 256, *memory)
    for model, stated in ((rnn, size.rnn_parameters), (teacher, size.teacher_parameters)):
        counted = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert counted == pytest.approx(stated, rel=0.1)
    assert f"{name} (RNN {size.rnn_parameters:g} M parameters" in describe_sizes()


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_comes_in_every_size(name: str):
    assert recipe(name) == recipe(name, STREAMS[name])
    for size, shape in SIZES.items():
        config = recipe(name, size)
        assert (config.teacher, config.cell) == (shape.teacher, shape.cell)
        assert config.smt.batch_size == shape.batch_size
        assert isinstance(config.data, Stream)
        assert config.name == name and config.data.path == f"data/{name}"


def test_the_papers_size_is_the_default_config():
    config = recipe("mnist")
    assert config.cell == type(config.cell)()
    assert config.teacher == type(config.teacher)(padding="void")
    assert config.smt.batch_size == 128


def test_sizes_get_smaller():
    counts = [size.rnn_parameters for size in SIZES.values()]
    assert counts == sorted(counts, reverse=True)


def test_other_recipes_have_one_size():
    assert set(STREAMS) < set(RECIPES)
    with pytest.raises(MemtrainError, match="digits has one size"):
        recipe("digits", "tiny")
    with pytest.raises(MemtrainError, match="did you mean small"):
        recipe("text", "smal")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", ["gru", "lstm", "mlp"])
def test_other_cells_have_about_as_many_parameters(name: str, kind: str):
    config = recipe("text", name, cell=kind)
    sizes = [
        sum(parameter.numel() for parameter in build_rnn(one, 256).cell.parameters())
        for one in (config, recipe("text", name))
    ]
    assert config.cell.kind == kind and sizes[0] == pytest.approx(sizes[1], rel=0.3)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_papers_gru_and_lstm_are_as_large_as_its_transformer(kind: str):
    sizes = [
        sum(p.numel() for p in build_rnn(recipe("mnist", cell=one), 256).parameters())
        for one in (kind, "transformer")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)


@pytest.mark.parametrize("name", STREAMS)
def test_bptt_trains_the_same_cell_on_the_same_data(name: str):
    for size in SIZES:
        config, smt = recipe(name, size, "bptt"), recipe(name, size)
        assert (config.data, config.cell, config.teacher) == (
            smt.data,
            smt.cell,
            smt.teacher,
        )
        assert not config.has_teacher and config.name == f"{name}-bptt"
    paper = recipe(name, "paper", "bptt").bptt
    assert (paper.batch_size, paper.sequence_length) == (128, 256)


@pytest.mark.parametrize("kind", ["transformer", "gru", "lstm"])
@pytest.mark.parametrize("name", STREAMS)
def test_smt_in_segments_trains_the_cell_of_the_other_methods_without_dmt(name: str, kind: str):
    for size in SIZES:
        config, bptt = (recipe(name, size, method, kind) for method in ("smt", "bptt"))
        assert (config.data, config.cell) == (bptt.data, bptt.cell)
        assert list(stage for stage, one in config.stages().items() if one.steps) == ["smt"]
        assert config.smt.steps == recipe(name, size).smt.steps
        assert config.smt.batch_size == bptt.bptt.batch_size
        # Windows are as long as BPTT's sequences, and divide into segments.
        length = config.teacher.context_length + config.smt.future_length
        assert length == bptt.bptt.sequence_length and length % config.smt.dynamics_steps == 0
        assert config.teacher.normalize_memory == bptt.teacher.normalize_memory
        assert config.name == f"{name}-smt"


@pytest.mark.parametrize("kind", ["transformer", "gru", "lstm"])
@pytest.mark.parametrize("name", STREAMS)
def test_bptt_in_pieces_is_bptt_that_trains_pieces_at_once(name: str, kind: str):
    for size in SIZES:
        config, bptt = (recipe(name, size, method, kind) for method in ("pieces", "bptt"))
        stage = config.bptt
        assert (stage.truncate, stage.sweeps, config.name) == (16, 1, f"{name}-pieces")
        whole = replace(stage, truncate=0, sweeps=0, learning_rate=bptt.bptt.learning_rate)
        assert replace(config, name=bptt.name, bptt=whole) == bptt


def test_methods_are_named():
    with pytest.raises(MemtrainError, match="method='bpt': did you mean bptt"):
        recipe("text", "tiny", "bpt")
    with pytest.raises(MemtrainError, match="digits has one method"):
        recipe("digits", method="bptt")


def test_the_small_digits_fit_the_package():
    """At most 4 MB in 16 bits, and one image is one sequence."""
    config = recipe("mnist-small")
    rnn = build_rnn(config, 256)
    assert 2 * sum(parameter.numel() for parameter in rnn.parameters()) < 4e6
    assert isinstance(config.data, Stream)
    assert config.data.evaluate_length == config.teacher.context_length == 196


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_gated_cells_on_text_have_longer_dmt_and_the_same_bptt(kind: str):
    gated, other = recipe("text", "tiny", cell=kind).dmt, recipe("text", "tiny").dmt
    assert gated.steps > other.steps and gated.learning_rate >= other.learning_rate
    assert gated.future_length < other.future_length
    assert recipe("images", "tiny", cell=kind).dmt == recipe("images", "tiny").dmt
    assert recipe("text", "tiny", "bptt", kind).bptt == recipe("text", "tiny", "bptt").bptt


def test_the_smallest_models_of_text_have_the_highest_rates():
    tiny, small = (recipe("text", size) for size in ("tiny", "small"))
    for name in ("smt", "dmt"):
        rates = [config.stages()[name].learning_rate for config in (tiny, small)]
        assert rates[0] == pytest.approx(3 * rates[1])
    assert tiny.dmt.learning_rate == tiny.smt.learning_rate / 2
    assert recipe("images", "tiny").smt == replace(
        recipe("images", "small").smt, batch_size=recipe("images", "tiny").smt.batch_size
    )
