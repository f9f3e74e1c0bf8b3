"""The paper's tables and figures, one file each. `memtrain reproduce NAME` runs one.

This page imports no torch, so that the list is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from memtrain.errors import MemtrainError, nearest

if TYPE_CHECKING:
    from memtrain.experiments.experiment import Experiment

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


def load(name: str) -> "Experiment":
    """A figure by name, or one of yours as package.module:Class."""
    from memtrain.experiments.experiment import Experiment
    from memtrain.load import load_class

    if ":" in name:
        made = load_class(name, "figure")()
        if not isinstance(made, Experiment):
            raise MemtrainError(f"figure {name}: must derive from memtrain's Experiment")
        made.name = name  # by which a worker finds it again
        return made
    if name not in FIGURES:
        raise MemtrainError(f"figure {name!r}: {nearest(name, [*FIGURES, 'all'])}")
    module = import_module(f"memtrain.experiments.{name.replace('-', '_')}")
    return module.FIGURE
