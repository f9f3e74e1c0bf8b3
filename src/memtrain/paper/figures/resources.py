"""The resources table: what a training step and one step of inference cost against length."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memtrain.config import Arithmetic, BPTTConfig, RunConfig
from memtrain.evaluation.cost import (
    CountedCell,
    mark_application,
    recurrent_depth,
    sequential_ops,
)
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import synthetic
from memtrain.plotting.style import COLOURS, log_x_axis, panels
from memtrain.training.run import Run

TRAINING = {
    "bytes": "memory (bytes kept)",
    "compute": "compute (FLOPs)",
    "operations": "sequential operations",
    "credit": "credit path (steps, layers)",
}
INFERENCE = {
    "state_bytes": "memory per sequence (bytes)",
    "step_compute": "compute (FLOPs per token)",
}
TIME = "step_seconds"
JUDGED = (*TRAINING, *INFERENCE)
# The highest power of T in each column of the paper's table, and the complexity class.
PAPER = {
    "Transformer": ((1, 2, 0, 0, 1, 1), "TC⁰"),
    "LA (parallel)": ((1, 2, 0, 0, 0, 0), "PNC¹"),
    "LA (recurrent)": ((0, 1, 0, 0, 0, 0), "PNC¹"),
    "BPTT": ((1, 1, 1, 1, 0, 0), "L/P"),
    "SMT": ((0, 0, 0, 0, 0, 0), "L/P"),
    "DMT": ((1, 1, 1, 0, 0, 0), "L/P"),
}
OURS = ("BPTT", "SMT", "DMT")
"""The rows that train an RNN; one RNN serves the inference columns of all three."""
LINE_STYLES = {
    "Transformer": dict(color=COLOURS[3], marker="D", markersize=4),
    "LA (parallel)": dict(color=COLOURS[4], marker="v", markersize=4),
    "LA (recurrent)": dict(color=COLOURS[6], marker=".", linestyle=":"),
    "BPTT": dict(color=COLOURS[1], linewidth=2.5, marker="^"),
    "SMT": dict(color=COLOURS[0], linewidth=2.5, marker="o"),
    "DMT": dict(color=COLOURS[2], linestyle="--", marker="s", markersize=4),
}
ORDERS = ("1", "T", "T²")
CONTEXTS = 64
"""One step of inference is measured after this many times T tokens: it is cheap."""


class Resources(Experiment):
    name = "resources"
    claim = (
        "SMT's memory, compute, sequential operations and credit path do not depend on the "
        "sequence length T; BPTT's all grow with T; DMT's grow but for the credit path; a step of "
        "an RNN costs the same after any number of tokens, that of a Transformer grows."
    )
    version = 2

    def grid(self, setup: Setup) -> list[Job]:
        longest = setup.pick(smoke=128, cpu=512, gpu=1024, paper=2048)
        lengths = [length for length in (32, 64, 128, 256, 512, 1024, 2048) if length <= longest]

        def config(T: int) -> RunConfig:
            # T_c and T_f are constant while T grows; one timestep per sequence is trained.
            base = synthetic(setup, Arithmetic(examples=T // 2))
            smt = replace(base.smt, timesteps=1, decode_timesteps=0, future_length=8)
            return replace(
                base,
                teacher=replace(base.teacher, encoder="bidirectional", context_length=16),
                smt=replace(smt, short_contexts=0.0),
                dmt=replace(base.dmt, through_time=False),
                bptt=BPTTConfig(steps=1),
            )

        return jobs_over(config, train=False, T=lengths)

    def measure(self, run: Run) -> dict:
        found: dict[str, dict] = {"context": {"tokens": CONTEXTS * run.task.sequence_length}}
        batch = run.task.sample(4, torch.Generator().manual_seed(0)).to(run.engine.device)
        for row in OURS:
            objective = run.objective(row.lower())

            def loss(objective=objective) -> Tensor:
                return objective(batch, torch.Generator().manual_seed(0)).total

            with run.engine.reference(objective):  # fused code would hide operations
                found[row] = _training_cost(loss)
                plain = run.rnn.cell
                run.rnn.cell = CountedCell(plain)
                found[row]["credit"] = recurrent_depth(loss())
                run.rnn.cell = plain
        memory, token = run.rnn.empty_memory(4), batch.inputs[:, 0]
        with run.engine.reference(run.models):
            step = _inference_cost(lambda: run.rnn.predict(run.rnn.cell(memory, token)), [memory])
        for row in OURS:
            found[row] |= step
        for row, mixer in MIXERS.items():
            found[row] = _layer_costs(run, mixer)
        return found

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        orders = {row: [_order(results, row, what) for what in JUDGED] for row in PAPER}
        differing = [
            f"{row}: {what} {ORDERS[found]} instead of {ORDERS[given]}"
            for row, (expected, _) in PAPER.items()
            for what, found, given in zip(JUDGED, orders[row], expected, strict=True)
            if found != given
        ]
        judged = [one for one in differing if not one.startswith("LA")]
        first, last = results[0], results[-1]
        names = {"Transformer": "Transformer", "LA (recurrent)": "LA", "SMT": "RNN"}
        times = ", ".join(
            f"{name} {last[row][TIME] / first[row][TIME]:.1f}" for row, name in names.items()
        )
        shown = "; ".join(
            f"{row} {', '.join(ORDERS[order] for order in found)}" for row, found in orders.items()
        )
        return Verdict(
            holds=not judged,
            sentence="Order in T of a training step's memory, compute, sequential operations and "
            f"credit path, and of one inference step's memory and compute: {shown}. Other than "
            f"in the paper's table: {'; '.join(differing) or 'nothing'}. One step after "
            f"{last['context']['tokens']:,} tokens takes as many times the time of one after "
            f"{first['context']['tokens']:,}: {times}.",
            numbers={"orders": orders, "differing": differing},
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        figure, axes = panels(3, 4, width=3.3, height=2.6)
        lengths = [result["T"] for result in results]
        contexts = [result["context"]["tokens"] for result in results]
        inference = {**INFERENCE, TIME: "time (seconds, not judged)"}
        places = list(axes.flat)
        for place, (what, label) in zip(places, {**TRAINING, **inference}.items(), strict=False):
            trained = what in TRAINING
            for row, style in LINE_STYLES.items():
                if trained or row in ("Transformer", "LA (recurrent)", "SMT"):  # each kind once
                    values = [result[row][what] for result in results]
                    place.plot(lengths if trained else contexts, values, label=row, **style)
            log_x_axis(place, lengths if trained else contexts[:: max(1, len(contexts) // 3)])
            place.set(yscale="log", xlabel="T" if trained else "tokens read before the step")
            place.set_title(f"{'training step' if trained else 'one step'}: {label}", fontsize=8)
        handles, labels = places[0].get_legend_handles_labels()
        places[7].set_axis_off()
        note = "One step: line of SMT is that of\nany RNN, LA's is that of both forms"
        places[7].legend(handles, labels, loc="center", title=note)
        grid = axes[0, 0].get_gridspec()
        for place in places[8:]:
            place.remove()
        _draw_table(figure.add_subplot(grid[2, :]), results)
        return figure


def _draw_table(place, results: Sequence[Result]) -> None:
    """The measured table; what differs from the paper's names the paper's value."""
    place.set_axis_off()
    header = [
        "",
        "training:\nmemory",
        "training:\ncompute",
        "sequential\noperations",
        "credit path",
    ]
    header += ["one step:\nmemory", "one step:\ncompute", "complexity class\n(known, not measured)"]
    rows = []
    for row, (expected, complexity) in PAPER.items():
        found = [_order(results, row, what) for what in JUDGED]
        cells = [
            ORDERS[one] if one == given else f"{ORDERS[one]} (paper: {ORDERS[given]})"
            for one, given in zip(found, expected, strict=True)
        ]
        rows.append([row, *cells, complexity])
    table = place.table([header, *rows], loc="center", cellLoc="center", bbox=(0, 0, 1, 1))
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (line, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d0d4d8")
        if line == 0 or column == 0:
            cell.set_facecolor("#eceef0")
        if "paper" in cell.get_text().get_text():
            cell.set_facecolor("#fbe3d6")


# ---------------------------------------------------------------------------------------- costs


def _training_cost(loss: Callable[[], Tensor]) -> dict[str, int]:
    with _counted_products() as counter:
        loss().backward()
    return {
        "bytes": kept_bytes(loss),
        "compute": counter.get_total_flops(),
        "operations": sequential_ops(loss),
    }


def _inference_cost(step: Callable[[], Tensor], state: Sequence[Tensor]) -> dict[str, int | float]:
    """Bytes of the state of one sequence, FLOPs and seconds of a step, per sequence and token."""
    rows, device = len(state[0]), state[0].device
    seconds = []
    with torch.no_grad():
        with _counted_products() as counter:
            step()
        for _ in range(20):
            _wait(device)
            begin = time.perf_counter()
            step()
            _wait(device)
            seconds.append(time.perf_counter() - begin)
    return {
        "state_bytes": sum(one.numel() * one.element_size() for one in state) // rows,
        "step_compute": counter.get_total_flops() // rows,
        TIME: min(seconds),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _counted_products() -> Iterator[FlopCounterMode]:
    """Count FLOPs of matrix products; attention is computed by them, because fused attention on a
    CPU is not counted."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def kept_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes of all tensors saved for the backward pass of `function`; each storage counts once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()  # kept alive, so that no storage is reused
    del result
    return sum(kept.values())


def _order(results: Sequence[Result], row: str, what: str) -> int:
    inference = what in INFERENCE
    x = [result["context"]["tokens"] if inference else result["T"] for result in results]
    return growth_order(x, [result[row][what] for result in results])


def growth_order(x: Sequence[int | float], y: Sequence[int | float]) -> int:
    """The highest power of x that makes at least a tenth of y at the last x: 0, 1 or 2.

    Counts are polynomials of x, so that the parabola through the last three is exact.
    """
    square, linear, _ = np.polyfit(x[-3:], y[-3:], 2)
    parts = {2: square * x[-1] ** 2, 1: linear * x[-1]}
    return next((power for power, part in parts.items() if part > 0.1 * y[-1]), 0)


# ------------------------------------------------- a Transformer's layer, and linear attention's

Heads = Float[Tensor, "B H T E"]


def softmax_attention(query: Heads, key: Heads, value: Heads) -> Heads:
    """Causal attention."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def parallel_linear(query: Heads, key: Heads, value: Heads) -> Heads:
    """Linear attention as masked products; scores are recomputed in the backward pass."""

    def mix(query: Heads, key: Heads, value: Heads) -> Heads:
        return (query @ key.mT).tril() @ value

    return checkpoint(mix, query, key, value, use_reentrant=False)  # type: ignore[return-value]


def recurrent_linear(query: Heads, key: Heads, value: Heads, chunk: int = 16) -> Heads:
    """Linear attention by its state, a sum over the past, in chunks; T is a multiple of them."""
    query, key, value = (x.unflatten(2, (-1, chunk)) for x in (query, key, value))
    added = key.mT @ value  # (B, H, N, E, E)
    state = added.cumsum(2) - added
    return (query @ state + (query @ key.mT).tril() @ value).flatten(2, 3)


MIXERS = {
    "Transformer": softmax_attention,
    "LA (parallel)": parallel_linear,
    "LA (recurrent)": recurrent_linear,
}


class MixingLayer(nn.Module):
    """A pre-norm layer: tokens are mixed by one of `MIXERS`, then read by an MLP."""

    def __init__(self, width: int, heads: int, mixer: Callable[..., Heads]) -> None:
        super().__init__()
        self.heads, self.mixer = heads, mixer
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        return self._finish(x, self.mixer(*self._split(x)))

    def step(self, x: Float[Tensor, "B 1 W"], state: list[Tensor]) -> Float[Tensor, "B 1 W"]:
        """One token after those in the state: the cached keys and values, or their sum."""
        query, key, value = self._split(x)
        if self.mixer is softmax_attention:
            for cache, new in zip(state, (key, value), strict=True):
                cache[:, :, -1:] = new
            keys, values = state
            mixed = F.scaled_dot_product_attention(query, keys, values)
        else:
            state[0] += key.mT @ value
            mixed = query @ state[0]
        return self._finish(x, mixed)

    def empty_state(self, rows: int, tokens: int) -> list[Tensor]:
        """The state with room for this many tokens: O(T) for attention, else O(1)."""
        width = self.project_out.in_features // self.heads
        weight = self.project_out.weight
        if self.mixer is softmax_attention:
            return [weight.new_zeros(rows, self.heads, tokens, width) for _ in range(2)]
        return [weight.new_zeros(rows, self.heads, width, width)]

    def _split(self, x: Float[Tensor, "B T W"]) -> tuple[Heads, ...]:
        return self.project_in(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(
            2, 0, 3, 1, 4
        ).unbind()  # fmt: skip

    def _finish(self, x: Float[Tensor, "B T W"], mixed: Heads) -> Float[Tensor, "B T W"]:
        x = mark_application(x + self.project_out(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.mlp_norm(x))


def _layer_costs(run: Run, mixer: Callable[..., Heads]) -> dict[str, int | float]:
    """The costs of as many layers of the same width as the cell has."""
    cell, device = run.config.cell, run.engine.device
    generator, tokens = torch.Generator().manual_seed(0), run.task.sequence_length
    layers = [MixingLayer(cell.width, cell.heads, mixer).to(device) for _ in range(cell.layers)]
    x = torch.randn(4, tokens, cell.width, generator=generator).to(device)

    def loss() -> Tensor:
        return nn.Sequential(*layers)(x).square().mean()

    states = [layer.empty_state(4, CONTEXTS * tokens) for layer in layers]

    def step() -> Tensor:
        one = x[:, :1]
        for layer, state in zip(layers, states, strict=True):
            one = layer.step(one, state)
        return one

    found = _training_cost(loss) | {"credit": recurrent_depth(loss())}
    return found | _inference_cost(step, [part for state in states for part in state])


FIGURE = Resources()
