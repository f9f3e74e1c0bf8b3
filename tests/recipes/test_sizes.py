"""Sizes are what they say."""

import pytest

from memtrain.config import Stream
from memtrain.errors import MemtrainError
from memtrain.nn.build import build_rnn
from memtrain.nn.teacher import Teacher
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


def test_the_small_digits_fit_the_package():
    """At most 4 MB in 16 bits, and one image is one sequence."""
    config = recipe("mnist-small")
    rnn = build_rnn(config, 256)
    assert 2 * sum(parameter.numel() for parameter in rnn.parameters()) < 4e6
    assert isinstance(config.data, Stream)
    assert config.data.evaluate_length == config.teacher.context_length == 196
