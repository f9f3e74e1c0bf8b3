"""Memories of two numbers, plotted in the plane, with the RNN's transition field."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import Copy, DataConfig, Retrieval, RunConfig, Stack
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over, scores
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import mean, where
from memtrain.plotting.style import panels
from memtrain.training.run import Run

TASKS: dict[str, tuple[DataConfig, int, str]] = {
    "retrieval": (Retrieval(sequence_length=8, vocab_size=4), 1, "reads a symbol"),
    "copy": (Copy(sequence_length=6, vocab_size=3), 0, "outputs a symbol"),
    "stack": (Stack(sequence_length=8, vocab_size=3, depth=2), 0, "pops"),
}
"""Each task, the token whose transition field is drawn, and the token's meaning."""
PLANE_CELL = "memtrain.experiments.memory_maps:PlaneCell"
"""PlaneCell by its path in version 0.1, so that job keys are unchanged."""


class PlaneCell(nn.Module):
    """An MLP on a memory of two numbers, without a norm, which would leave only a circle."""

    memory_tokens, memory_dim = 1, 2

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.from_memory = nn.Linear(2, width)
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(
        self, memory: Float[Tensor, "B 1 2"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B 1 2"]:
        x = self.from_memory(memory[:, 0]) + self.embedding(token).to(memory.dtype)
        return self.mlp(x)[:, None]


class MemoryMaps(Experiment):
    name = "memory-maps"
    claim = (
        "The teacher's memory reflects the structure of the task: on retrieval many pasts share a "
        "few states, on copying every string has its own."
    )

    def grid(self, setup: Setup) -> list[Job]:
        steps = setup.pick(smoke=12, cpu=1500, gpu=4000, paper=20_000)

        def config(task: str, seed: int) -> RunConfig:
            base = synthetic(setup, TASKS[task][0], steps=steps, seed=seed)
            return replace(
                base,
                teacher=replace(base.teacher, normalize_memory=False),
                cell=replace(base.cell, kind=PLANE_CELL, memory_dim=2),
                smt=replace(base.smt, decode_timesteps=0),
                dmt=replace(base.dmt, steps=steps // 3),
                # The whole memory is two numbers: bf16 would leave about 8 bits for each.
                engine=replace(base.engine, precision="fp32"),
            )

        return jobs_over(config, task=TASKS, seed=setup.seeds)

    @torch.no_grad()
    def measure(self, run: Run) -> dict:
        assert run.teacher is not None
        batch = run.task.held_out(128, torch.Generator().manual_seed(1)).to(run.engine.device)
        memory = run.teacher.encode(batch.inputs)[:, :, 0].cpu().numpy()  # (B, T, 2)
        states = true_states(run.config.data.kind, batch.inputs.tolist())
        points, names = memory.reshape(-1, 2), np.array(sum(states, []))
        return scores(run) | {
            "points": points.round(4).tolist(),
            "states": names.tolist(),
            "within": within_share(points, names),
            "apart": least_distance(points, names),
            "field": transition_field(run, points, TASKS[run.config.data.kind][1]),
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers = {
            f"{task}_{what}": mean(where(results, task=task), what)
            for task in TASKS
            for what in ("within", "apart", "teacher_accuracy", "rnn_accuracy")
        }
        within, copied = numbers["retrieval_within"], numbers["copy_teacher_accuracy"]
        return Verdict(
            # The decoder reads only the two numbers, so that its accuracy shows what they encode.
            holds=within < 0.1 and numbers["retrieval_teacher_accuracy"] > 0.9 and copied > 0.9,
            sentence=f"Retrieval: {within:.1%} of the memories' variance is within the task's true "
            f"states (teacher's accuracy {numbers['retrieval_teacher_accuracy']:.2f}, RNN's "
            f"{numbers['retrieval_rnn_accuracy']:.2f}). Copy: strings are decoded from the two "
            f"numbers with accuracy {copied:.2f} (RNN {numbers['copy_rnn_accuracy']:.2f}); the "
            f"distance of the nearest two states is {numbers['copy_apart']:.3f} of the spread. "
            f"Stack: teacher {numbers['stack_teacher_accuracy']:.2f}, RNN "
            f"{numbers['stack_rnn_accuracy']:.2f}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(1, len(TASKS), width=3.8, height=3.6)
        for place, (task, (_, _, what)) in zip(axes[0], TASKS.items(), strict=True):
            of = where(results, task=task)
            result = max(of, key=lambda found: found["rnn_accuracy"])
            points = np.array(result["points"])
            codes = {name: index for index, name in enumerate(sorted(set(result["states"])))}
            colours = [codes[name] for name in result["states"]]
            start, step = np.array(result["field"]).transpose(1, 2, 0)  # each (2, N)
            # Arrows are cut at the grid's spacing, because long ones overlap.
            longest = np.ptp(start, axis=1).max() / 13
            step = step * np.minimum(1, longest / np.linalg.norm(step, axis=0).clip(1e-9))
            place.quiver(
                *start, *step, color="#b6bbc0", width=0.003, angles="xy", scale_units="xy", scale=1
            )
            place.scatter(*points.T, c=colours, cmap="turbo", s=9, linewidths=0, zorder=3)
            low, high = points.min(axis=0), points.max(axis=0)
            room = 0.1 * (high - low) + 1e-6
            (left, bottom), (right, top) = low - room, high + room
            place.set(xlim=(left, right), ylim=(bottom, top))
            place.set_title(f"{task}: {len(codes)} states; field: {what}", fontsize=9)
            place.grid(False)
        return figure


def true_states(kind: str, rows: list[list[int]]) -> list[list[str]]:
    """The state after each token: pasts with the same futures share one."""
    return [_STATES[kind](row) for row in rows]


def _retrieval_states(row: list[int]) -> list[str]:
    states, marker = [], row.index(0)
    for time in range(len(row)):
        after = time - marker
        states.append("before" if after < 0 else "next" if after == 0 else str(row[marker + 1]))
    return states


def _copy_states(row: list[int]) -> list[str]:
    half = len(row) // 2
    text = "".join(map(str, row[:half]))
    # In the second half, the symbols already copied are no longer needed.
    reading = [text[: time + 1] + "?" for time in range(half - 1)] + [text]
    return reading + [text[: half - 1 - time] for time in range(half)]


def _stack_states(row: list[int]) -> list[str]:
    states, stack, popped = [], [], "-"
    for token in row:
        popped = str(stack.pop()) if token == 0 else "-"
        if token:
            stack.append(token)
        states.append("".join(map(str, stack)) + f" said {popped}")
    return states


_STATES = {"retrieval": _retrieval_states, "copy": _copy_states, "stack": _stack_states}


def within_share(points: np.ndarray, names: np.ndarray) -> float:
    """Share of the variance within states; 0 if each state is one point."""
    inside = sum(
        ((points[names == name] - points[names == name].mean(axis=0)) ** 2).sum()
        for name in set(names.tolist())
    )
    return float(inside / max(1e-12, ((points - points.mean(axis=0)) ** 2).sum()))


def least_distance(points: np.ndarray, names: np.ndarray) -> float:
    """Distance of the two nearest states' centres, relative to the spread of all memories."""
    centres = np.array([points[names == name].mean(axis=0) for name in sorted(set(names.tolist()))])
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    spread = np.sqrt(((points - points.mean(axis=0)) ** 2).sum(axis=1).mean())
    return float(apart.min() / max(1e-12, spread))


def transition_field(run: Run, points: np.ndarray, token: int, side: int = 14) -> list:
    """Points on a grid over the memories, and the cell's steps from there: (N, 2, 2)."""
    low, high = points.min(axis=0), points.max(axis=0)
    ticks = [np.linspace(low[axis], high[axis], side) for axis in (0, 1)]
    grid = np.stack(np.meshgrid(*ticks), axis=-1).reshape(-1, 2).astype(np.float32)
    memory = torch.from_numpy(grid)[:, None].to(run.engine.device)
    tokens = torch.full((len(grid),), token, device=run.engine.device)
    moved = run.rnn.cell(memory, tokens)[:, 0].float().cpu().numpy()
    return np.stack([grid, moved - grid], axis=1).round(4).tolist()


FIGURE = MemoryMaps()
