"""The paper's tables and figures, in `figures/`. `memtrain reproduce NAME` runs one.

Importing this module does not import torch, so that listing the figures is quick.
"""

import re
from importlib import import_module
from typing import TYPE_CHECKING

from memtrain.errors import MemtrainError, did_you_mean

if TYPE_CHECKING:
    from memtrain.paper.base import Experiment

FIGURES = {
    "resources": "Cost of a training step against sequence length",
    "synthetic": "Five synthetic tasks, two sweeps each",
    "mnist-samples": "Digits generated pixel by pixel",
    "sketchy-samples": "Sketches generated patch by patch",
    "sequential-compute": "Loss against sequential operations and tokens",
    "memory-scaling": "More context, more memory",
    "model-scaling": "Larger models",
    "compression": "More compute, smaller memories",
    "joint": "Joint against detached training",
    "gradients": "Gradients along time",
    "lambdas": "Weights of the dynamics and the uniformity loss",
    "dmt": "Drift before and after DMT",
    "length": "Sequences longer than in training",
    "memory-maps": "Two-dimensional memories",
    "memory-evolution": "Memories while an image is read",
}
"""Titles by name, in the paper's order; the module's name has underscores instead of hyphens."""
MORE = {"post-training": "Short BPTT after each way of pretraining"}
"""Titles of tables that are not in the paper; `all` leaves them out."""
SHARED_MODULES = {"mnist-samples": "samples:MNIST", "sketchy-samples": "samples:SKETCHY"}
"""Figures that share a module: its name, and theirs in it; the others are called FIGURE."""


def is_own(name: str) -> bool:
    """Whether a name has the form package.module:Class."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name) is not None


def is_figure(name: str) -> bool:
    """Whether a name is one of our figures, or has the form package.module:Class."""
    return name in {**FIGURES, **MORE} or is_own(name)


def load(name: str) -> "Experiment":
    """Load one of our figures, or import your own, named package.module:Class."""
    from memtrain.config.validation import load_class
    from memtrain.paper.base import Experiment

    if ":" in name:
        if not is_own(name):
            raise MemtrainError(f"figure {name!r}: must be package.module:Class")
        try:
            figure = load_class(name, "figure")()
        except TypeError as error:  # an abstract method is missing, or it takes arguments
            raise MemtrainError(f"figure {name}: cannot be created ({error})") from None
        if not isinstance(figure, Experiment):
            raise MemtrainError(f"figure {name}: must derive from memtrain's Experiment")
        figure.name = name  # workers load it by this name
        return figure
    if name not in {**FIGURES, **MORE}:
        raise MemtrainError(f"figure {name!r}: {did_you_mean(name, [*FIGURES, *MORE, 'all'])}")
    place = SHARED_MODULES.get(name, f"{name.replace('-', '_')}:FIGURE")
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"memtrain.paper.figures.{module}"), attribute)
