"""Recipes: functions that return a whole RunConfig. `memtrain train NAME` runs one.

A recipe is a starting point: every field of what it returns can be changed, on the command line
(`--smt.steps 2000`) or with `dataclasses.replace`.
"""

from collections.abc import Callable
from inspect import signature

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError, nearest
from memtrain.recipes.digits import digits
from memtrain.recipes.mnist_small import mnist_small
from memtrain.recipes.streams import images, mnist, sketchy, text, tinystories, tokens
from memtrain.recipes.synthetic import (
    arithmetic,
    copy,
    custom,
    recall,
    retrieval,
    retrieval_bptt,
    stack,
)

RECIPES: dict[str, Callable[..., RunConfig]] = {
    "retrieval": retrieval,
    "retrieval-bptt": retrieval_bptt,
    "copy": copy,
    "stack": stack,
    "recall": recall,
    "arithmetic": arithmetic,
    "digits": digits,
    "mnist": mnist,
    "mnist-small": mnist_small,
    "tinystories": tinystories,
    "sketchy": sketchy,
    "text": text,
    "images": images,
    "tokens": tokens,
    "custom": custom,
}


STREAMS: dict[str, str] = {
    name: signature(make).parameters["size"].default
    for name, make in RECIPES.items()
    if "size" in signature(make).parameters
}
"""The recipes of real data, which come in sizes, and their usual size."""


def recipe(name: str, size: str | None = None) -> RunConfig:
    """The config of a recipe by name; those of real data come in sizes (`sizes.SIZES`)."""
    if name not in RECIPES:
        raise MemtrainError(f"recipe {name!r}: {nearest(name, RECIPES)}")
    if size is None:
        return RECIPES[name]()
    if name not in STREAMS:
        raise MemtrainError(f"size={size!r}: {name} has one size; {', '.join(STREAMS)} have more")
    return RECIPES[name](size)
