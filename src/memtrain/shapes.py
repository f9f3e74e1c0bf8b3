"""Letters for tensor shapes, and the records that pass through a training step.

Every tensor in the library is described with these letters:

| letter | meaning                                                   |
| ------ | --------------------------------------------------------- |
| B      | sequences in a batch                                      |
| T      | tokens in a sequence                                      |
| S      | timesteps chosen from a sequence                          |
| N      | rows of any kind: B, or B·S after flattening              |
| C      | context length: how far back the teacher sees             |
| F      | future length: how many targets a memory predicts         |
| M, D   | a memory is M tokens of width D                           |
| W      | inner width of a Transformer                              |
| V      | vocabulary size                                           |

Time runs as in the paper: `memory[t]` has read the inputs 0..t and predicts `targets[t]`.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position without a target."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and their targets."""

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]

    def to(self, device) -> "Batch":
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Window:
    """The futures of some timesteps, which the memories made there have to predict.

    `future_targets[..., k]` follows `future_inputs[..., :k]`, so K = F - 1.
    """

    future_inputs: Int[Tensor, "B S K"]
    future_targets: Int[Tensor, "B S F"]


@dataclass(frozen=True, slots=True)
class Losses:
    """The result of an objective: the scalar to minimise and its named, detached parts."""

    total: Float[Tensor, ""]
    parts: dict[str, Tensor]
