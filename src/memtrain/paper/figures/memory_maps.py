"""Memories of two numbers, plotted in the plane, and the RNN's transition field for two tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import Copy, Retrieval, RunConfig, Stack
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over, scores
from memtrain.paper.configs import synthetic
from memtrain.paper.plots import mean, where
from memtrain.plotting.style import COLOURS, panels
from memtrain.training.run import Run

TASKS: dict[str, tuple[Retrieval | Copy | Stack, dict[int, str]]] = {
    "retrieval": (Retrieval(sequence_length=8, vocab_size=4), {0: "marker", 1: "symbol 1"}),
    "copy": (Copy(sequence_length=6, vocab_size=3), {0: "output a symbol", 1: "read symbol 1"}),
    "stack": (Stack(sequence_length=8, vocab_size=3, depth=2), {0: "pop", 1: "push 1"}),
}
"""Each task, and the tokens whose transition fields are drawn, with their meaning."""
LABELS = {"before": "start", "next": "needle is next", "": "(end)"}
"""Names of states in the figure, where they differ."""
SIDE = 13
"""Points per side of the grid on which fields are drawn."""
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
    version = 2
    claim = (
        "The teacher's memory reflects the structure of the task: on retrieval many pasts share a "
        "few states, on copying every string has its own."
    )

    def grid(self, setup: Setup) -> list[Job]:
        steps = setup.pick(smoke=12, cpu=1500, gpu=20_000, paper=20_000)

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
            "edges": edge_length(points, names, run.task.sequence_length),
            "fields": {
                str(token): transition_field(run, points, token)
                for token in TASKS[run.config.data.kind][1]
            },
        }

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers = {
            f"{task}_{what}": mean(where(results, task=task), what)
            for task in TASKS
            for what in ("within", "apart", "edges", "teacher_accuracy", "rnn_accuracy")
        }
        within, copied = numbers["retrieval_within"], numbers["copy_teacher_accuracy"]
        return Verdict(
            # The decoder reads only the two numbers, so that its accuracy shows what they encode.
            holds=within < 0.1 and numbers["retrieval_teacher_accuracy"] > 0.9 and copied > 0.9,
            sentence=f"Retrieval: {within:.1%} of the memories' variance is within the task's true "
            f"states (teacher's accuracy {numbers['retrieval_teacher_accuracy']:.2f}, RNN's "
            f"{numbers['retrieval_rnn_accuracy']:.2f}). Copy: strings are decoded from the two "
            f"numbers with accuracy {copied:.2f} (RNN {numbers['copy_rnn_accuracy']:.2f}); the "
            f"distance of the nearest two states is {numbers['copy_apart']:.3f} of the spread, and "
            f"a step along the tree of strings {numbers['copy_edges']:.2f} of the distance of two "
            "states. "
            f"Stack: teacher {numbers['stack_teacher_accuracy']:.2f}, RNN "
            f"{numbers['stack_rnn_accuracy']:.2f}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(2, len(TASKS), width=4.0, height=3.7)
        for (above, below), (task, (data, tokens)) in zip(axes.T, TASKS.items(), strict=True):
            result = max(where(results, task=task), key=lambda found: found["rnn_accuracy"])
            points, names = np.array(result["points"]), np.array(result["states"])
            centres = _centres(points, names)
            codes = {name: index for index, name in enumerate(centres)}
            for pair in _transitions(names, data.sequence_length):
                above.plot(*np.stack([centres[name] for name in pair]).T, color="#c4c9ce", lw=0.7)
            shades = [codes[name] for name in names]
            above.scatter(*points.T, c=shades, cmap="turbo", s=9, linewidths=0, zorder=3)
            for name, centre in centres.items():
                style = dict(fontsize=7, xytext=(3, 3), textcoords="offset points", zorder=4)
                above.annotate(LABELS.get(name, name), centre, **style)
            accuracy = f"teacher {result['teacher_accuracy']:.2f}, RNN {result['rnn_accuracy']:.2f}"
            above.set_title(f"{task}: {len(codes)} true states ({accuracy})", fontsize=9)
            for token, colour in zip(tokens, COLOURS, strict=False):
                _draw_field(below, result["fields"][str(token)], colour, tokens[token])
            below.scatter(*points.T, color="#9aa0a6", s=5, linewidths=0, zorder=3)
            below.set_title(f"{task}: steps of the RNN", fontsize=9)
            below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2, fontsize=8)
            low, high = points.min(axis=0), points.max(axis=0)
            room = 0.1 * (high - low) + 1e-6
            (left, bottom), (right, top) = low - room, high + room
            for place in (above, below):
                place.set(xlim=(left, right), ylim=(bottom, top))
                place.grid(False)
        return figure


def _draw_field(place, field: list, colour: str, label: str) -> None:
    """Arrows from a grid of memories, cut at the grid's spacing because long ones overlap."""
    start, step = np.array(field).transpose(1, 2, 0)  # each (2, N)
    # In units of the panel: both axes are scaled to the memories.
    scale = np.ptp(start, axis=1, keepdims=True).clip(1e-9)
    length = np.linalg.norm(step / scale, axis=0).clip(1e-9)
    step = step * np.minimum(1, 1 / (SIDE - 1) / length)
    style = dict(width=0.004, angles="xy", scale_units="xy", scale=1)
    place.quiver(*start, *step, color=colour, alpha=0.75, label=label, **style)


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
    states, stack = [], []
    for token in row:
        output = f", pop {stack.pop()}" if token == 0 else ""
        if token:
            stack.append(token)
        states.append("".join(map(str, stack)) + output if stack else f"empty{output}")
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
    centres = np.array(list(_centres(points, names).values()))
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    spread = np.sqrt(((points - points.mean(axis=0)) ** 2).sum(axis=1).mean())
    return float(apart.min() / max(1e-12, spread))


def edge_length(points: np.ndarray, names: np.ndarray, length: int) -> float:
    """Mean distance of a state and the one after it, relative to that of two different states.

    Args:
        points: memories of sequences of `length`, one after the other.
        names: their true states.
        length: of a sequence.
    """
    centres = _centres(points, names)
    edges = [centres[one] - centres[other] for one, other in _transitions(names, length)]
    every = np.array(list(centres.values()))
    apart = np.linalg.norm(every[:, None] - every[None], axis=-1)
    between = apart.sum() / max(1, len(every) * (len(every) - 1))
    return float(np.linalg.norm(edges, axis=-1).mean() / max(1e-12, between))


def _centres(points: np.ndarray, names: np.ndarray) -> dict[str, np.ndarray]:
    return {name: points[names == name].mean(axis=0) for name in sorted(set(names.tolist()))}


def _transitions(names: np.ndarray, length: int) -> list[tuple[str, str]]:
    """Pairs of different states that follow one another in a sequence."""
    rows = names.reshape(-1, length)
    pairs = zip(rows[:, :-1].ravel().tolist(), rows[:, 1:].ravel().tolist(), strict=True)
    return sorted({pair for pair in pairs if pair[0] != pair[1]})


def transition_field(run: Run, points: np.ndarray, token: int) -> list:
    """Points on a grid over the memories, and the cell's steps from there: (N, 2, 2)."""
    low, high = points.min(axis=0), points.max(axis=0)
    ticks = [np.linspace(low[axis], high[axis], SIDE) for axis in (0, 1)]
    grid = np.stack(np.meshgrid(*ticks), axis=-1).reshape(-1, 2).astype(np.float32)
    memory = torch.from_numpy(grid)[:, None].to(run.engine.device)
    tokens = torch.full((len(grid),), token, device=run.engine.device)
    moved = run.rnn.cell(memory, tokens)[:, 0].float().cpu().numpy()
    return np.stack([grid, moved - grid], axis=1).round(4).tolist()


FIGURE = MemoryMaps()
