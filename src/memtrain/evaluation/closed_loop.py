"""The closed loop: a network that reads its own predictions, for forecasts of numbers."""

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.errors import MemtrainError
from memtrain.models.layers import evaluation_mode
from memtrain.models.likelihood import Distribution
from memtrain.models.rnn import RNN
from memtrain.shapes import Values

PATH_FLOATS = {"cuda": 2**26, "cpu": 2**22}
"""Floats in the memories of the paths that are run together."""
MOST_ROWS = 2**14
READ = 2**26
"""Floats in the memories of the past that are read at once."""


def rows_together(rnn: RNN) -> int:
    """How many paths are run together, so that memory use is bounded."""
    memory = rnn.empty_memory(1)
    return max(1, min(MOST_ROWS, PATH_FLOATS.get(memory.device.type, 2**22) // memory.numel()))


@torch.no_grad()
def closed_loop(
    rnn: RNN,
    inputs: Float[Tensor, "B P X"],
    steps: int,
    *,
    known: Float[Tensor, "B K Z"] | None = None,
    count: int = 100,
    seed: int = 0,
    mean: bool = False,
    rows: int | None = None,
) -> Float[Tensor, "N B H Y"]:
    """Sample what follows, in the model's units: read the past, then each sample in turn.

    Row b has its own generator, so its paths do not depend on the other rows, on how many paths
    there are or, up to rounding, on how many are run together.

    Args:
        rnn: a network that reads numbers.
        inputs: the past, read from the empty memory.
        steps: H, how many steps to predict.
        known: known[:, h] are the known numbers of the input whose target numbers are prediction h,
            so they tell of the time after it. The last prediction is not read: H - 1 suffice.
        count: paths per row, N.
        seed: of the random numbers.
        mean: read the predicted means instead of samples; there is one path then.
        rows: paths that are run together; by default as many as memory allows.

    Raises:
        MemtrainError: a prediction is not finite.
    """
    assert isinstance(rnn.space, Values)
    count, rows = 1 if mean else count, rows_together(rnn) if rows is None else rows
    found = []
    with evaluation_mode(rnn):
        for first in range(0, len(inputs), block := max(1, rows // count)):
            part = slice(first, first + block)
            memory = _read(rnn, inputs[part])
            given = None if known is None else known[part]
            random = _uniforms(seed, first, len(memory), count, steps, rnn.space.targets)
            # A single row may have more paths than are run together.
            paths = [
                _write(rnn, memory, steps, given, None if mean else some)
                for some in random.split(max(1, rows // len(memory)))
            ]
            found.append(torch.cat(paths))
    every = torch.cat(found, dim=1)
    if not bool((finite := every.isfinite().all(dim=3).all(dim=1).all(dim=0)).all()):
        raise MemtrainError(
            f"steps={steps}: step {int((~finite).nonzero()[0]) + 1} is not finite: the network "
            "diverges on its own predictions; take fewer steps, or train rollouts (DMT)"
        )
    return every


def _uniforms(
    seed: int, first: int, rows: int, count: int, steps: int, targets: int
) -> Float[Tensor, "N B H 2 Y"]:
    """Random numbers of some rows, which depend on the seed and the row's place alone."""
    drawn = []
    for row in range(first, first + rows):
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + row) % 2**63)
        drawn.append(torch.rand(count, steps, 2, targets, generator=generator))
    return torch.stack(drawn, dim=1)


def _read(rnn: RNN, inputs: Float[Tensor, "B P X"]) -> Float[Tensor, "B M D"]:
    """The memory after the past."""
    memory = rnn.empty_memory(len(inputs))
    for part in inputs.split(max(1, READ // memory.numel()), dim=1):
        memory = rnn.unroll(part, memory)[:, -1]
    return memory


def _write(
    rnn: RNN,
    memory: Float[Tensor, "B M D"],
    steps: int,
    known: Float[Tensor, "B K Z"] | None,
    uniforms: Float[Tensor, "N B H 2 Y"] | None,
) -> Float[Tensor, "N B H Y"]:
    """Paths after each memory: of samples, or without random numbers one of means."""
    assert isinstance(rnn.space, Values)
    rows, count = len(memory), 1 if uniforms is None else len(uniforms)
    memory = memory.repeat(count, 1, 1)
    random = None if uniforms is None else uniforms.flatten(0, 1).to(memory.device)
    path = []
    for step in range(steps):
        predicted = Distribution.of(rnn.predict(memory), rnn.space)
        if random is None:
            path.append(predicted.mean())
        else:
            path.append(predicted.sample_from(random[:, step].movedim(1, 0)))
        if step + 1 < steps:
            token = path[-1]
            if known is not None:
                token = torch.cat([token, known[:, step].repeat(count, 1)], dim=-1)
            memory = rnn.cell(memory, token)
    return torch.stack(path, dim=1).unflatten(0, (count, rows))
