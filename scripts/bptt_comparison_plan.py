"""The plan of bptt_comparison.py: its runs, their measurements, and the table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from memtrain.config import RunConfig, Stream
from memtrain.data.stream import StreamTask
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import evaluate
from memtrain.files import write_atomic
from memtrain.generation.generate import generate
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict
from memtrain.paper.job import collect
from memtrain.paper.plots import where
from memtrain.paper.results import ResultsFile
from memtrain.paper.sweep import results_of
from memtrain.plotting.style import COLOURS, panels, save
from memtrain.recipes import recipe
from memtrain.runs.progress import MetricsFile
from memtrain.training.run import Run

NAME = "bptt_comparison_plan:BPTTComparison"
OURS = "SMT → DMT"
TITLES = {"transformer": "BPTT, Transformer", "gru": "BPTT, GRU"}
TUNED = 5
"""A learning rate is tuned with this fraction of the steps: one in five."""
VALIDATED = 5
"""And evaluated on this fraction of the sequences, because many runs end together: one in five."""
SAMPLES = 16
FULL = 0.9
"""Fraction of a device's memory for runs; evaluations and CUDA itself need some too."""


@dataclass(kw_only=True)
class Plan:
    """The content of FOLDER/plan.json."""

    size: str
    data_dir: str
    device: str
    sequences: dict[str, int]
    """By data set: held-out documents of the evaluation; a fifth as many others choose the rate."""
    rates: dict[str, list[float]]
    seconds: dict[str, float] = field(default_factory=dict)
    """By data set: the budget."""
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By cell: seconds per step and fraction of the device's memory, or an error."""
    chosen: dict[str, float] = field(default_factory=dict)
    """The learning rate of a contender that is being trained."""
    seeds: dict[str, int] = field(default_factory=dict)
    """By contender: the number of seeds, if more than one."""
    ours: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By data set: the runs of SMT -> DMT."""

    def others(self, data: str) -> int:
        return max(1, self.sequences[data] // VALIDATED)

    @staticmethod
    def read(folder: Path) -> "Plan":
        return Plan(**json.loads((folder / "plan.json").read_text()))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "plan.json", (json.dumps(asdict(self), indent=2) + "\n").encode())

    def contenders(self) -> list[tuple[str, str]]:
        """Pairs of data set and cell whose step was timed."""
        timed = [cell for cell in self.rates if "seconds" in self.timed.get(cell, {})]
        return [(data, cell) for data in self.seconds for cell in timed]

    def steps(self, data: str, cell: str) -> int:
        return max(1, math.floor(self.seconds[data] / self.timed[cell]["seconds"]))

    def base(self, data: str, cell: str) -> RunConfig:
        """The recipe's BPTT on this machine's data."""
        config = recipe(data, size=self.size, method="bptt", cell=cell)
        assert isinstance(config.data, Stream)
        return replace(
            config,
            data=replace(config.data, path=str(Path(self.data_dir) / data)),
            engine=replace(config.engine, device=self.device),
        )

    def job(self, data: str, cell: str, rate: float, *, tuning: bool, seed: int = 0) -> Job:
        base = self.base(data, cell)
        steps = self.steps(data, cell)
        steps = max(1, steps // TUNED) if tuning else steps
        stage = replace(base.bptt, steps=steps, learning_rate=rate)
        # Frequent checkpoints, because a command may end at any time; few evaluations.
        log = replace(
            base.log,
            every=max(1, steps // 100),
            evaluate_every=0 if tuning else max(1, steps // 4),
            checkpoint_every=max(1, steps // (5 if tuning else 20)),
        )
        tags = {"data": data, "cell": cell, "rate": rate, "tuning": tuning, "seed": seed}
        name = f"{data}-{cell}-tune" if tuning else f"{data}-{cell}"
        return Job(config=replace(base, name=name, seed=seed, bptt=stage, log=log), tags=tags)

    def fit(self, cells: Sequence[str]) -> bool:
        """Whether runs of these cells fit into the device's memory together."""
        return sum(self.timed[cell]["share"] for cell in cells) <= FULL

    def tries(self, data: str, cell: str) -> list[Job]:
        return [self.job(data, cell, rate, tuning=True) for rate in self.rates[cell]]

    def full_runs(self, data: str, cell: str) -> list[Job]:
        """All seeds of a contender, once its rate is chosen."""
        who = f"{data}/{cell}"
        if who not in self.chosen:
            return []
        return [
            self.job(data, cell, self.chosen[who], tuning=False, seed=seed)
            for seed in range(self.seeds.get(who, 1))
        ]


class BPTTComparison(Experiment):
    """Held-out nats of SMT -> DMT and BPTT after equal seconds of training."""

    name = NAME
    claim = "In the same wall-clock SMT -> DMT ends with fewer nats than BPTT with either cell."

    def grid(self, setup: Setup) -> list[Job]:
        plan = Plan.read(setup.folder)
        return [job for contender in plan.contenders() for job in plan.tries(*contender)]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """The full runs whose rate is chosen."""
        plan = Plan.read(setup.folder)
        return [job for contender in plan.contenders() for job in plan.full_runs(*contender)]

    def measure(self, run: Run) -> dict[str, Any]:
        folder = run.folder.parents[1]
        plan = Plan.read(folder)
        found: dict[str, Any] = {"validation_nats": validate(run, plan)}
        if run.config.name.endswith("-tune"):
            return found
        evaluation = run.evaluate(plan.sequences[data_of(run)], baselines=True)
        picture = run.spelling is not None and run.spelling.picture is not None
        seed = f"-seed-{run.config.seed}" if run.config.seed else ""
        samples = Path("samples") / f"{run.config.name}{seed}.{'png' if picture else 'txt'}"
        length = None if picture else evaluation.length
        generate(run, count=SAMPLES, length=length).save(folder / samples)
        parameters = sum(p.numel() for p in run.rnn.parameters())
        about = {"unit": run.task.unit, "parameters": parameters, "samples": str(samples)}
        return found | about | asdict(evaluation)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        plan, words, fewer, numbers = Plan.read(setup.folder), [], [], {}
        for data in plan.seconds:
            nats = nats_of(plan, data, results)
            means = {name: mean(some) for name, some in nats.items() if some}
            numbers[data] = nats
            if OURS in means and len(means) == 1 + len(plan.rates):
                ours = means.pop(OURS)
                best = min(means.values())
                fewer.append(ours < best)
                words.append(f"{data} {ours:.4f} against {best:.4f}")
        sentence = f"Nats of {OURS} and of the better BPTT: {', '.join(words) or 'not known yet'}."
        known = len(fewer) == len(plan.seconds) > 0
        return Verdict(holds=all(fewer) if known else None, sentence=sentence, numbers=numbers)

    def plot(self, setup: Setup, results: Sequence[Result]):
        plan = Plan.read(setup.folder)
        figure, axes = panels(1, max(1, len(plan.seconds)))
        figure.suptitle("held-out nats from the empty memory (dotted: the best count model)")
        for place, data in zip(axes[0], plan.seconds, strict=False):
            # Missing results keep their position and colour.
            nats = nats_of(plan, data, results)
            means = [mean(some) if some else math.nan for some in nats.values()]
            bars = place.bar(list(nats), means, color=COLOURS[: len(nats)])
            known = [f"{nat:.3f}" if math.isfinite(nat) else "" for nat in means]
            place.bar_label(bars, known, label_type="center", color="white")
            for at, some in enumerate(nats.values()):
                if len(some) > 1:  # seeds
                    place.plot([at] * len(some), some, "k_", markersize=20)
            runs = where(results, data=data, tuning=False)
            if counted := [model["nats"] for run in runs for model in run["baselines"]]:
                place.axhline(min(counted), color="0.4", linestyle=":")
            place.set_xlim(-0.6, len(nats) - 0.4)
            place.set_title(f"{data}, {plan.seconds[data]:.0f} s")
            place.set_ylabel("nats")
            place.tick_params(axis="x", rotation=20)
        return figure


def nats_of(plan: Plan, data: str, results: Sequence[Result]) -> dict[str, list[float]]:
    """The known nats of each method, one number per seed."""
    nats: dict[str, list[float]] = {name: [] for name in (OURS, *TITLES.values())}
    nats[OURS] = [one["nats"] for one in plan.ours.get(data, [])]
    for run in where(results, data=data, tuning=False):
        nats[TITLES[run["cell"]]].append(run["rnn"]["nats"])
    return nats


def validate(run: Run, plan: Plan) -> float:
    """Nats from the empty memory on held-out documents that the evaluation does not use."""
    data, device = data_of(run), run.engine.device
    count, skip = plan.others(data), plan.sequences[data]
    with run.engine.eval_mode():
        return evaluate(run.task, run.rnn, sequences=count, skip=skip, device=device).rnn.nats


def data_of(run: Run) -> str:
    """The data set of a run of `Plan.job`."""
    return run.config.name.partition("-")[0]


def check_documents(plan: Plan, data: str) -> None:
    """Raise an error if there are too few held-out documents."""
    config = plan.base(data, "gru").data
    assert isinstance(config, Stream)
    there = StreamTask.from_config(config).held_out_sequences
    count, others = plan.sequences[data], plan.others(data)
    if there < count + others:
        raise MemtrainError(
            f"--sequences {data}={count}: {config.path} has {there} held-out documents, and "
            f"{others} more are needed to choose the learning rate; use fewer"
        )


def state_of(folder: Path, job: Job, result: Result | None) -> dict[str, Any]:
    """The progress of a run, and its error, if any."""
    (work,) = collect([(BPTTComparison(), job)])
    place = folder / work.place
    trace = place.with_name(place.name + ".error.txt")
    lines = MetricsFile(place / "metrics.jsonl").read()
    step = lines[-1]["step"] if lines else 0
    state = {"folder": str(place), "steps": job.config.bptt.steps, "step": step}
    if result is not None:
        return state | {"state": "diverged" if result.diverged else "done", "why": result.diverged}
    if trace.exists():
        tail = trace.read_text().splitlines()[-12:]
        return state | {"state": "failed", "log": str(trace), "tail": tail}
    return state | {"state": "to continue" if step else "to start"}


def summary(plan: Plan, folder: Path, protocol: str) -> dict[str, Any]:
    """The content of beside.json."""
    setup, figure = Setup(scale="paper", folder=folder), BPTTComparison()
    runs, results, stored = [], [], ResultsFile(folder).by_id()
    for job in [*figure.grid(setup), *figure.follow_up(setup, [])]:
        (result,) = results_of(stored, figure, [job]) or [None]
        results += [result] if result else []
        run = {**job.tags, **state_of(folder, job, result)}
        if result:
            run |= {"measured": result.measured, "cost": result.cost, "curve": result.curve}
        runs.append(run)
    save(figure.plot(setup, results), folder / "beside.png")
    verdict = asdict(figure.verdict(setup, results))
    return {"protocol": protocol, "plan": asdict(plan), "verdict": verdict, "runs": runs}


def table(record: Mapping[str, Any]) -> str:
    """The full runs and the runs that they are compared with, as Markdown."""
    plan = record["plan"]
    lines = [
        "| data | trained by | seed | nats | state | rate | steps | tokens | "
        "sequential operations | ms per step, alone | seconds |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for data, seconds in plan["seconds"].items():
        for one in plan["ours"].get(data, []):
            counts = f"{one['steps']:,} | {one['tokens']:,} | {one['sequential_ops']:,}"
            spent = f"{one['seconds']:.0f}"
            lines.append(
                f"| {data} | {OURS} | {one.get('seed', '')} | {one['nats']:.4f} | done | | "
                f"{counts} | | {spent} |"
            )
        counted: dict[str, float] = {}
        for run in record["runs"]:
            if run["data"] != data or run["tuning"]:
                continue
            nats, counts = "", f"{run['step']:,} of {run['steps']:,} | |"
            if "measured" in run:
                nats, cost = f"{run['measured']['rnn']['nats']:.4f}", run["cost"]
                counts = f"{cost['steps']:,} | {cost['tokens']:,} | {cost['sequential_ops']:,}"
                counted = {one["name"]: one["nats"] for one in run["measured"]["baselines"]}
            step = 1000 * plan["timed"][run["cell"]]["seconds"]
            lines.append(
                f"| {data} | {TITLES[run['cell']]} | {run['seed']} | {nats} | {run['state']} | "
                f"{run['rate']:g} | {counts} | {step:.1f} | {seconds:.0f} |"
            )
        if counted:
            name = min(counted, key=lambda one: counted[one])
            lines.append(
                f"| {data} | best count model ({name}) | | {counted[name]:.4f} | | | | | | | |"
            )
    lines += ["", "Nats on held-out documents that chose the learning rate:", ""]
    for run in record["runs"]:
        if run["tuning"]:
            nats = run.get("measured", {}).get("validation_nats")
            shown = f"{nats:.4f}" if nats is not None and run["state"] == "done" else run["state"]
            lines.append(f"- {run['data']}, {TITLES[run['cell']]}, {run['rate']:g}: {shown}")
    for who, rate in plan["chosen"].items():
        if rate in (min(tried := plan["rates"][who.partition("/")[2]]), max(tried)):
            lines.append(f"- {who}: {rate:g} is at the edge of the rates that were tried")
    lines += [
        f"- failed: {run['log']}: {run['tail'][-1]}" for run in record["runs"] if "tail" in run
    ]
    lines += [
        f"- {cell} was not timed: {one['error']}"
        for cell, one in plan["timed"].items()
        if "error" in one
    ]
    return "\n".join(lines)
