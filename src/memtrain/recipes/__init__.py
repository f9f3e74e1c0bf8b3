"""Recipes: functions that return a whole RunConfig. `memtrain train NAME` runs one.

A recipe is a starting point: every field can be changed, on the command line (`--smt.steps 2000`)
or with `dataclasses.replace`.
"""

from collections.abc import Callable
from inspect import signature

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.recipes import datasets, synthetic
from memtrain.recipes.series import series

_MAKERS: tuple[Callable[..., RunConfig], ...] = (
    *(synthetic.retrieval, synthetic.retrieval_bptt, synthetic.copy, synthetic.stack),
    *(synthetic.recall, synthetic.arithmetic, synthetic.parity, synthetic.modular_arithmetic),
    synthetic.s5,
    *(
        datasets.digits,
        datasets.mnist,
        datasets.mnist_small,
        datasets.tinystories,
        datasets.enwik8,
        datasets.sketchy,
        datasets.text,
    ),
    *(datasets.images, datasets.tokens, series, datasets.labels, synthetic.custom),
)
RECIPES = {make.__name__.replace("_", "-"): make for make in _MAKERS}
CHOICES = {name: tuple(signature(make).parameters) for name, make in RECIPES.items()}
"""What can be chosen of each recipe: size, method, cell."""
STREAMS: dict[str, str] = {
    name: signature(RECIPES[name]).parameters["size"].default
    for name, choices in CHOICES.items()
    if "size" in choices
}
"""The recipes for streams of real data, which have several sizes, and their default size."""


def recipe(
    name: str, size: str | None = None, method: str | None = None, cell: str | None = None
) -> RunConfig:
    """The config of a recipe by name.

    Args:
        name: one of `RECIPES`.
        size: of the models (`sizes.SIZES`), for real data.
        method: smt-dmt, or bptt for comparison, for real data and series; for real data also smt,
            SMT in segments without DMT, and pieces, BPTT in pieces that are trained at once.
        cell: transformer, gru, lstm or mlp, with about as many parameters.
    """
    if name not in RECIPES:
        raise MemtrainError(f"recipe {name!r}: {did_you_mean(name, RECIPES)}")
    given = {"size": size, "method": method, "cell": cell}
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if key in CHOICES[name]:
            continue
        other = f"{name}-{value}"
        instead = f"memtrain train {other}; " if other in RECIPES else ""
        raise MemtrainError(
            f"{key}={value!r}: {name} has one {key}; {instead}{', '.join(STREAMS)} have more"
        )
    return RECIPES[name](**chosen)
