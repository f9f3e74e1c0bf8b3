"""Options of a preparation, as a command line gives them."""

import inspect
from pathlib import Path

import pytest

from memtrain.data.prepare import (
    DATA_SETS,
    checked_options,
    prepare_images,
    prepare_path,
    prepare_text,
)
from memtrain.data.prepare.options import NOT_OPTIONS
from memtrain.errors import MemtrainError


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (prepare_images, {"threshold": "abc"}, "threshold=abc: must be a whole number"),
        (prepare_images, {"size": "large"}, "size=large: must be a whole number or two whole"),
        (prepare_images, {"patch": 2.0}, "patch=2.0: must be a whole number"),
        (prepare_images, {"levels": True}, "levels=True: must be a whole number"),
        (prepare_images, {"mirror": 1}, "mirror=1: must be true or false"),
        (prepare_text, {"separator": "yes"}, "separator=yes: must be true or false"),
        (prepare_text, {"held_out": "much"}, "held_out=much: must be a number"),
        (prepare_text, {"mode": 7}, "mode=7: must be a word"),
        (prepare_text, {"seperator": True}, "seperator: text has no such option"),
        (prepare_text, {"overwrite": True}, "overwrite: text has no such option"),
    ],
)
def test_what_is_of_another_kind_is_refused_in_words(function, options: dict, said: str):
    with pytest.raises(MemtrainError, match=said):
        checked_options(function, options)


def test_words_stand_for_true_and_false_and_whole_numbers_are_numbers():
    assert checked_options(prepare_text, {"separator": "false"}) == {"separator": False}
    assert checked_options(prepare_text, {"separator": "True"}) == {"separator": True}
    (share,) = checked_options(prepare_text, {"held_out": 1}).values()
    assert share == 1.0 and type(share) is float
    assert checked_options(prepare_images, {"size": (3, 4), "threshold": None}) == {
        "size": (3, 4),
        "threshold": None,
    }


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_default_is_of_the_kind_that_is_asked_for(name: str):
    parameters = inspect.signature(DATA_SETS[name]).parameters
    options = {key: one.default for key, one in parameters.items() if key not in NOT_OPTIONS}
    assert options
    assert checked_options(DATA_SETS[name], options) == options


def test_a_word_for_false_is_false(tmp_path: Path):
    text = tmp_path / "two"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text(name * 200)
    with_zeros = prepare_path(text, tmp_path / "with", separator="true")
    without = prepare_path(text, tmp_path / "without", separator="false")
    assert with_zeros.meta.separator == 0 and without.meta.separator is None
