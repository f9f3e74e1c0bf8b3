"""The paper's tables and figures, one file each. `memtrain reproduce NAME` runs one.

This page imports no torch, so that the list is quick.
"""

import re
from importlib import import_module
from typing import TYPE_CHECKING

from memtrain.errors import MemtrainError, did_you_mean

if TYPE_CHECKING:
    from memtrain.paper.base import Experiment

FIGURES = {
    "resources": "What a training step costs as sequences grow",
    "synthetic": "Five synthetic tasks, two sweeps each",
    "mnist-samples": "Digits drawn pixel by pixel",
    "sketchy-samples": "Sketches drawn patch by patch",
    "sequential-compute": "Loss against sequential operations and tokens",
    "memory-scaling": "More context, more memory",
    "model-scaling": "Larger models",
    "compression": "Compute buys smaller memories",
    "joint": "Joint against detached training",
    "gradients": "Gradients along time",
    "lambdas": "Weights of the dynamics and the uniformity loss",
    "dmt": "Drift before and after DMT",
    "length": "Longer sequences than in training",
    "memory-maps": "Two-dimensional memories",
    "memory-evolution": "Memories while an image is read",
}
"""Names in the paper's order; the module of a name has underscores for its hyphens."""


def is_own(name: str) -> bool:
    """Whether a name is that of a class to import, package.module:Class."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name) is not None


def is_figure(name: str) -> bool:
    """Whether a name is one of the paper's figures, or has the form of a class to import."""
    return name in FIGURES or is_own(name)


def load(name: str) -> "Experiment":
    """A figure by name, or one of yours as package.module:Class, which is imported."""
    from memtrain.config.validation import load_class
    from memtrain.paper.base import Experiment

    if ":" in name:
        if not is_own(name):
            raise MemtrainError(f"figure {name!r}: must be package.module:Class")
        try:
            made = load_class(name, "figure")()
        except TypeError as error:  # a method of the contract is missing, or it takes arguments
            raise MemtrainError(f"figure {name}: cannot be made ({error})") from None
        if not isinstance(made, Experiment):
            raise MemtrainError(f"figure {name}: must derive from memtrain's Experiment")
        made.name = name  # by which a worker finds it again
        return made
    if name not in FIGURES:
        raise MemtrainError(f"figure {name!r}: {did_you_mean(name, [*FIGURES, 'all'])}")
    module = import_module(f"memtrain.paper.figures.{name.replace('-', '_')}")
    return module.FIGURE
