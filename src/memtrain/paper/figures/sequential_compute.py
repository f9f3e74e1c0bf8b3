"""Loss against sequential operations and against tokens: three cells, two data sets."""

import math
from collections.abc import Sequence
from itertools import product

from memtrain.paper.base import Result, Setup, Verdict, memory_uniformity, scores
from memtrain.paper.configs import Method, TunedExperiment, tuned
from memtrain.paper.plots import STYLES, average, cost_ratio, mean
from memtrain.plotting.style import legend, log_x_axis, panels
from memtrain.training.run import Run

CELLS = ("Transformer", "MLP", "GRU")
DATA = ("tinystories", "mnist")
WAYS = ("SMT → DMT", "BPTT")


class SequentialCompute(TunedExperiment):
    name = "sequential-compute"
    claim = (
        "SMT → DMT needs far fewer sequential operations than BPTT for the same loss with "
        "Transformer and MLP cells; a GRU ends worse with it than with BPTT."
    )
    data_sets = DATA
    methods = [
        Method({"data": data, "cell": cell, "way": way}, data, way, cell)
        for data, cell, way in product(DATA, CELLS, WAYS)
    ]

    def measure(self, run: Run) -> dict:
        return scores(run) | {"uniformity": memory_uniformity(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers, words, expected = {}, [], []
        for data, cell in product(DATA, CELLS):
            ours, theirs = (tuned(results, data=data, cell=cell, way=way) for way in WAYS)
            target, reached = mean(theirs, "rnn_nats"), mean(ours, "rnn_nats")
            needed = average(_operations_to(result, target) for result in ours)
            ratio = average(result.cost["sequential_ops"] for result in theirs) / needed
            numbers[f"{data}_{cell}"] = {
                "bptt_nats": target,
                "ours_nats": reached,
                "operations_bptt_over_ours": ratio,
                "tokens_bptt_over_ours": cost_ratio(ours, theirs, "tokens"),
                "uniformity_ours": mean(ours, "uniformity"),
            }
            shown = f"{ratio:.1f} times" if ratio else "not reached"
            words.append(f"{data} {cell} {reached:.2f} against {target:.2f} ({shown})")
            expected.append(reached > target if cell == "GRU" else ratio > 1)
        return Verdict(
            holds=all(expected),
            sentence="Nats of SMT → DMT against BPTT, and how many times as many sequential "
            f"operations BPTT needed for its loss: {'; '.join(words)}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib.ticker import EngFormatter

        figure, axes = panels(4, len(CELLS), width=3.0, height=2.2)
        costs = ("sequential_ops", "tokens")
        for place, (data, x, cell) in zip(axes.flat, product(DATA, costs, CELLS), strict=True):
            for way in WAYS:
                for result in tuned(results, data=data, cell=cell, way=way):
                    first = result["seed"] == 0
                    _curve(place, result, x, "rnn_nats", way, first)
                    if way == WAYS[0]:
                        _curve(place, result, x, "teacher_nats", "teacher", first)
            log_x_axis(place)
            place.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
            place.set_title(f"{data}, {cell}", fontsize=9)
            place.set_xlabel(x.replace("_ops", " operations"))
        for place in axes[:, 0]:
            place.set_ylabel("nats per token")
        legend(figure, axes[0, 0])
        return figure


def _operations_to(result: Result, target: float) -> float:
    """Sequential operations until the RNN's loss reached the target; infinite if it never did."""
    reached = [point["sequential_ops"] for point in result.curve if point["rnn_nats"] <= target]
    return min(reached, default=math.inf)


def _curve(place, result: Result, x: str, y: str, label: str, labelled: bool) -> None:
    points = [point for point in result.curve if y in point]
    style = STYLES[label] | {"markersize": 2.5, "linewidth": 1.2}
    shown = label if labelled else None
    place.plot([p[x] for p in points], [p[y] for p in points], label=shown, **style)


FIGURE = SequentialCompute()
