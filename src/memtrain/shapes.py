"""The vocabulary of shapes, and the three records that travel through a training step.

Every tensor in the library is described with these letters:

| letter | meaning                                                   |
| ------ | --------------------------------------------------------- |
| B      | sequences in a batch                                      |
| T      | tokens in a sequence                                      |
| S      | timesteps chosen from a sequence                          |
| N      | rows of any kind: B, or B·S after flattening              |
| C      | context length: how far back the teacher looks            |
| F      | future length: how many targets a memory is asked for     |
| M, D   | a memory is M tokens of width D                           |
| W      | inner width of a Transformer                              |
| V      | vocabulary size                                           |

Time runs as in the paper: `memory[t]` has read the inputs 0..t and predicts `targets[t]`.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position at which nothing is asked."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences as the data gives them; each starts at its own beginning."""

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]

    def to(self, device) -> "Batch":
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Window:
    """The futures of some timesteps: what a memory made there has to predict.

    `future_targets[..., k]` is due after `future_inputs[..., :k]` were read, so there is one
    future input less than there are targets.
    """

    future_inputs: Int[Tensor, "B S K"]
    future_targets: Int[Tensor, "B S F"]


@dataclass(frozen=True, slots=True)
class Losses:
    """What an objective returns: the scalar to minimise and its named, detached parts."""

    total: Float[Tensor, ""]
    parts: dict[str, Tensor]
