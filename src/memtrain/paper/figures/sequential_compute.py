"""Loss against sequential operations and against tokens: three cells, two data sets."""

import math
from collections.abc import Sequence

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, memory_uniformity, scores
from memtrain.paper.configs import method_config
from memtrain.paper.plots import STYLES, average, best, mean, where
from memtrain.plotting.style import legend, log_x_axis, panels
from memtrain.training.run import Run

CELLS = ("Transformer", "MLP", "GRU")
DATA = ("tinystories", "mnist")
WAYS = ("SMT → DMT", "BPTT")


class SequentialCompute(Experiment):
    name = "sequential-compute"
    claim = (
        "SMT → DMT needs far fewer sequential operations than BPTT for the same loss with "
        "Transformer and MLP cells; a GRU ends worse with it than with BPTT."
    )
    data_sets = ("tinystories", "mnist")

    def grid(self, setup: Setup) -> list[Job]:
        rates = setup.pick(
            smoke=(1e-3,), cpu=(1e-3, 3e-3), gpu=(3e-4, 1e-3), paper=(1e-4, 3e-4, 1e-3)
        )
        return [
            _job(setup, data, cell, way, rate, 0)
            for data in DATA
            for cell in CELLS
            for way in WAYS
            for rate in rates
        ]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        return [
            _job(setup, data, cell, way, _best_rate(results, data, cell, way), seed)
            for data in DATA
            for cell in CELLS
            for way in WAYS
            for seed in setup.seeds
            if seed
        ]

    def measure(self, run: Run) -> dict:
        return scores(run) | {"uniformity": memory_uniformity(run)}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        numbers, words = {}, []
        for data in DATA:
            for cell in CELLS:
                ours, theirs = (_runs(results, data, cell, way) for way in WAYS)
                target = mean(theirs, "rnn_nats")
                needed = average(_operations_to(result, target) for result in ours)
                spent = average(result.cost["sequential_ops"] for result in theirs)
                name = f"{data}_{cell}"
                numbers[name] = {
                    "bptt_nats": target,
                    "ours_nats": mean(ours, "rnn_nats"),
                    "operations_bptt_over_ours": spent / needed,
                    "tokens_bptt_over_ours": average(r.cost["tokens"] for r in theirs)
                    / average(r.cost["tokens"] for r in ours),
                    "uniformity_ours": mean(ours, "uniformity"),
                }
                words.append(
                    f"{data} {cell} {numbers[name]['ours_nats']:.2f} against {target:.2f}"
                    f" ({_ratio(spent / needed)})"
                )
        fewer = all(
            numbers[f"{data}_{cell}"]["operations_bptt_over_ours"] > 1
            for data in DATA
            for cell in CELLS[:2]
        )
        gru = all(numbers[f"{d}_GRU"]["ours_nats"] > numbers[f"{d}_GRU"]["bptt_nats"] for d in DATA)
        return Verdict(
            holds=fewer and gru,
            sentence="Nats of SMT → DMT against BPTT, and how many times as many sequential "
            f"operations BPTT needed for its loss: {'; '.join(words)}.",
            numbers=numbers,
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib.ticker import EngFormatter

        figure, axes = panels(4, len(CELLS), width=3.0, height=2.2)
        for row, (data, x) in enumerate(
            (data, x) for data in DATA for x in ("sequential_ops", "tokens")
        ):
            for column, cell in enumerate(CELLS):
                place = axes[row, column]
                for way in WAYS:
                    for index, result in enumerate(_runs(results, data, cell, way)):
                        label = way if index == 0 else None
                        _curve(place, result, x, "rnn_nats", STYLES[way], label)
                        if way == WAYS[0]:
                            label = "teacher" if index == 0 else None
                            _curve(place, result, x, "teacher_nats", STYLES["teacher"], label)
                log_x_axis(place)
                place.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1M
                place.set_title(f"{data}, {cell}", fontsize=9)
                place.set_xlabel(x.replace("_ops", " operations"))
            axes[row, 0].set_ylabel("nats per token")
        legend(figure, axes[0, 0])
        return figure


def _job(setup: Setup, data: str, cell: str, way: str, rate: float, seed: int) -> Job:
    tags = {"data": data, "cell": cell, "way": way, "rate": rate, "seed": seed}
    return Job(config=method_config(setup, data, f"{way}, {cell}", rate, seed), tags=tags)


def _best_rate(results: Sequence[Result], data: str, cell: str, way: str) -> float:
    return best(where(results, data=data, cell=cell, way=way, seed=0), "rnn_nats")["rate"]


def _runs(results: Sequence[Result], data: str, cell: str, way: str) -> list[Result]:
    rate = _best_rate(results, data, cell, way)
    return where(results, data=data, cell=cell, way=way, rate=rate)


def _operations_to(result: Result, target: float) -> float:
    """Sequential operations until the RNN's loss reached the target; infinite if it never did."""
    reached = [point["sequential_ops"] for point in result.curve if point["rnn_nats"] <= target]
    return min(reached, default=math.inf)


def _ratio(value: float) -> str:
    return f"{value:.1f} times" if value else "not reached"


def _curve(place, result: Result, x: str, y: str, style: dict, label: str | None) -> None:
    points = [point for point in result.curve if y in point]
    style = style | {"markersize": 2.5, "linewidth": 1.2}
    place.plot([p[x] for p in points], [p[y] for p in points], label=label, **style)


FIGURE = SequentialCompute()
