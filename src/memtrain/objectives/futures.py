"""From sequences to windows: the timesteps to train, and the future of each."""

import torch
from jaxtyping import Int
from torch import Tensor

from memtrain.shapes import IGNORE_INDEX, Batch, Window


def gather_window(batch: Batch, steps: Int[Tensor, "B S"], future_length: int) -> Window:
    """What the memories made after `steps` have to predict.

    A future that reaches beyond its sequence, at either end, has IGNORE_INDEX there.
    The inputs there are arbitrary, since the decoder is causal and nothing reads them.
    """
    length = batch.inputs.shape[1]
    future_length = min(future_length, length)
    due = steps[..., None] + torch.arange(future_length, device=steps.device)  # (B, S, F)
    rows = torch.arange(len(steps), device=steps.device)[:, None, None]
    inside = (due >= 0) & (due < length)
    due = due.clamp(0, length - 1)
    targets = batch.targets[rows, due].where(inside, IGNORE_INDEX)
    return Window(batch.inputs[rows, due[..., 1:]], targets)


def target_positions(
    targets: Int[Tensor, "N F"],
) -> tuple[Int[Tensor, "N A"], Int[Tensor, "N A"]]:
    """Where each row has targets, and these targets; rows with fewer are filled up with others.

    A is the largest number of targets in a row. Reading it stalls a GPU, so this is for the CPU.
    """
    asked = targets != IGNORE_INDEX
    most = max(1, int(asked.sum(dim=1).max()))
    positions = asked.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return positions, targets.gather(1, positions)
