"""SMT -> DMT beside BPTT (Transformer cell, and a GRU of equal size) under the same wall-clock.

    python scripts/beside.py --seconds mnist=400 tinystories=400 sketchy=356 --minutes 9
    python scripts/beside.py --minutes 9        # goes on where it stopped, as often as needed
    python scripts/beside.py table --ours mnist=runs/mnist/figures/evaluation-784.json

Runs share the GPU, where a clock would lie, so BPTT gets steps instead of seconds:

time   A BPTT step of each cell is timed alone on the device, after compilation and capture, keeping
       everything for the backward pass, which is its fastest form. Tokens are random, as many
       symbols as text has. A contender's steps are the data set's seconds over these: start-up,
       evaluation and saving are free of charge.
tune   Three learning rates each for a fifth of the steps, warm-up and cosine over that fifth,
       seed 0. The best has the lowest nats from the empty memory on held-out documents that come
       after those of the evaluation in its own order, so that the two share none.
train  All steps at the best rate, warm-up and cosine as the recipe has them. Data, models, batch,
       length and the share of windows that begin documents are the recipe's. Runs that would not
       fit beside each other recompute (`bptt.recompute`), which leaves gradients as they are.
       Then, as `memtrain eval --sequences 512`: nats from the empty memory over whole sequences
       at the last step, count models; and 16 pictures or texts, FOLDER/samples.
table  FOLDER/beside.json, beside.md and beside.png, of what there is. With --ours also the runs
       of SMT -> DMT, from the JSON that `memtrain eval RUN --sequences 512` left.

What is done stays done: the same command goes on, without --seconds too. After --minutes, or on
SIGTERM, runs save themselves. A run that fails is told with its log, and tried again next time.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memtrain.bench.cases import FOREVER, Case
from memtrain.bench.measure import time_case
from memtrain.bench.report import machine
from memtrain.config import RunConfig, Stream
from memtrain.data.store import open_store
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.eval.evaluate import evaluate
from memtrain.experiments.drawing import COLOURS, panels, save
from memtrain.experiments.experiment import Experiment, Job, Result, Setup, Verdict, where
from memtrain.experiments.launch import run_locally
from memtrain.experiments.mps import shared_gpu
from memtrain.experiments.sweep import Place, place_of, results_of, sweep
from memtrain.experiments.work import Event, Failed, Work, collect
from memtrain.recipes import recipe
from memtrain.run import Run
from memtrain.shapes import Batch
from memtrain.train.engine import pick_device
from memtrain.train.files import write_whole
from memtrain.train.metrics import MetricsFile
from memtrain.writer import generate

NAME = "beside:Beside"
PHASES = ("time", "tune", "train", "table")
DATA = ("mnist", "tinystories", "sketchy")
RATES = {"transformer": [1e-4, 3e-4, 1e-3], "gru": [3e-4, 1e-3, 3e-3]}
OURS = "SMT → DMT"
TITLES = {"transformer": "BPTT, Transformer", "gru": "BPTT, GRU"}
TUNED = 5
"""One in so many of the steps is enough to choose a learning rate."""
SAMPLES = 16
TIMED = 5.0
"""Seconds for which steps are timed."""


@dataclass(kw_only=True)
class Plan:
    """What a folder compares: FOLDER/plan.json."""

    size: str
    data_dir: str
    device: str
    sequences: int
    """Held-out documents of the evaluation; as many others choose the learning rate."""
    processes: int
    """Runs that share the device."""
    rates: dict[str, list[float]]
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each data set: the budget."""
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each cell: seconds of a step, or an error."""
    chosen: dict[str, float] = field(default_factory=dict)
    """The learning rate of a contender that is being trained."""
    ours: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each data set: what SMT -> DMT reached."""

    @staticmethod
    def read(folder: Path) -> "Plan":
        return Plan(**json.loads((folder / "plan.json").read_text()))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.json", (json.dumps(asdict(self), indent=2) + "\n").encode())

    def contenders(self) -> list[tuple[str, str]]:
        """Data set and cell, where it is known how long a step takes."""
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

    def job(self, data: str, cell: str, rate: float, *, tuning: bool) -> Job:
        base = self.base(data, cell)
        steps = self.steps(data, cell)
        steps = max(1, steps // TUNED) if tuning else steps
        stage = replace(
            base.bptt,
            steps=steps,
            learning_rate=rate,
            recompute=math.isqrt(base.bptt.sequence_length) * self.timed[cell]["recompute"],
        )
        # A command may end at any time; looks along the way are for the curve only.
        log = replace(
            base.log,
            every=max(1, steps // 100),
            evaluate_every=0 if tuning else max(1, steps // 4),
            checkpoint_every=max(1, steps // 20),
        )
        tags = {"data": data, "cell": cell, "rate": rate, "tuning": tuning}
        name = f"{data}-{cell}-tune" if tuning else f"{data}-{cell}"
        return Job(config=replace(base, name=name, bptt=stage, log=log), tags=tags)

    def tries(self, data: str, cell: str) -> list[Job]:
        return [self.job(data, cell, rate, tuning=True) for rate in self.rates[cell]]


class Beside(Experiment):
    """Equal seconds: what SMT -> DMT and BPTT make of them."""

    name = NAME
    claim = "In the same wall-clock SMT -> DMT ends with fewer nats than BPTT with either cell."

    def grid(self, setup: Setup) -> list[Job]:
        plan = Plan.read(setup.folder)
        return [job for contender in plan.contenders() for job in plan.tries(*contender)]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """What is being trained."""
        plan = Plan.read(setup.folder)
        return [
            plan.job(data, cell, plan.chosen[f"{data}/{cell}"], tuning=False)
            for data, cell in plan.contenders()
            if f"{data}/{cell}" in plan.chosen
        ]

    def measure(self, run: Run) -> dict[str, Any]:
        folder = run.folder.parents[1]
        plan = Plan.read(folder)
        found = {"validation_nats": validate(run, plan.sequences)}
        if run.config.name.endswith("-tune"):
            return found
        evaluation = run.evaluate(plan.sequences, baselines=True)
        picture = run.spelling is not None and run.spelling.picture is not None
        samples = Path("samples") / f"{run.config.name}.{'png' if picture else 'txt'}"
        length = None if picture else evaluation.length
        generate(run, count=SAMPLES, length=length).save(folder / samples)
        parameters = sum(p.numel() for p in run.rnn.parameters())
        said = {"unit": run.task.unit, "parameters": parameters, "samples": str(samples)}
        return found | said | asdict(evaluation)

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        plan, words, fewer, numbers = Plan.read(setup.folder), [], [], {}
        for data in plan.seconds:
            nats = {r["cell"]: r["rnn"]["nats"] for r in where(results, data=data, tuning=False)}
            numbers[data] = nats | {"ours": plan.ours.get(data, {}).get("nats")}
            if data in plan.ours and len(nats) == len(plan.rates):
                best = min(nats.values())
                fewer.append(plan.ours[data]["nats"] < best)
                words.append(f"{data} {plan.ours[data]['nats']:.4f} against {best:.4f}")
        told = f"Nats of {OURS} and of the better BPTT: {', '.join(words) or 'not known yet'}."
        known = len(fewer) == len(plan.seconds) > 0
        return Verdict(holds=all(fewer) if known else None, sentence=told, numbers=numbers)

    def plot(self, setup: Setup, results: Sequence[Result]):
        plan = Plan.read(setup.folder)
        figure, axes = panels(1, max(1, len(plan.seconds)))
        for place, data in zip(axes[0], plan.seconds, strict=False):
            runs = where(results, data=data, tuning=False)
            bars = {TITLES[run["cell"]]: run["rnn"]["nats"] for run in runs}
            bars |= {OURS: plan.ours[data]["nats"]} if data in plan.ours else {}
            place.bar(list(bars), list(bars.values()), color=COLOURS[: len(bars)])
            place.set_title(f"{data}, {plan.seconds[data]:g} s")
            place.set_ylabel("nats")
            place.tick_params(axis="x", rotation=20)
        return figure


class Others(Task):
    """A task whose held-out sequences come after the first ones in the evaluation's own order."""

    def __init__(self, task: Task, first: int) -> None:
        self.task, self.first = task, first
        self.vocab_size, self.sequence_length = task.vocab_size, task.sequence_length

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        return self.task.sample(count, generator)

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        # The order of documents follows from the generator alone, however many are asked for.
        batch = self.task.held_out(self.first + count, generator)
        return Batch(batch.inputs[self.first :], batch.targets[self.first :])


def validate(run: Run, sequences: int) -> float:
    """Nats from the empty memory on as many documents as the evaluation has, none of them its."""
    others, device = Others(run.task, sequences), run.engine.device
    with run.engine.looking():
        return evaluate(others, run.rnn, None, sequences=sequences, device=device).rnn.nats


# ---------------------------------------------------------------------------------------- phases


def measure_step(plan: Plan, data: str, cell: str) -> dict[str, Any]:
    """Seconds of a BPTT step that keeps everything, on a device that does nothing else."""
    config = plan.base(data, cell)
    stage = replace(config.bptt, steps=FOREVER, recompute=0)
    tokens = stage.batch_size * stage.sequence_length
    config = replace(config, bptt=stage)
    case = Case(suite="bptt", label=cell, batch=stage.batch_size, tokens=tokens, config=config)
    timing = time_case(case, config.engine, TIMED)
    device = pick_device(plan.device)
    room = torch.cuda.get_device_properties(device).total_memory if timing.peak_bytes else math.inf
    crowded = (timing.peak_bytes or 0) * plan.processes > 0.9 * room
    shape = {"batch": stage.batch_size, "length": stage.sequence_length, "device": machine(device)}
    return asdict(timing) | shape | {"recompute": crowded}


def time_steps(plan: Plan, folder: Path) -> None:
    """Each cell in a process of its own, so that this one never holds the device."""
    for cell in plan.rates:
        if "seconds" in plan.timed.get(cell, {}):
            continue
        print(f"time: {cell}, alone on the device", flush=True)
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                found = alone.submit(measure_step, plan, next(iter(plan.seconds)), cell).result()
            print(f"  {1000 * found['seconds']:.1f} ms a step, start-up {found['start_up']:.0f} s")
        except Exception as error:  # the other cell goes on
            found = {"error": f"{type(error).__name__}: {error}"}
            print(f"  failed: {found['error']}")
        plan.timed[cell] = found
        plan.write(folder)


def learn(plan: Plan, folder: Path, phases: Sequence[str], over: Callable[[], bool]) -> None:
    """Tune, and train what is tuned, in one sweep: nobody waits for the slowest."""
    lost: set[str] = set()
    begun: set[str] = set()

    def launch(queue: deque[Work]) -> Iterator[Event]:
        for event in run_locally(queue, folder, plan.processes, over):
            if isinstance(event, Failed):
                lost.add(event.key)
            yield event

    def more(results: Mapping[Place, Result]) -> list[tuple[str, Job]]:
        """The full runs of contenders whose tries are all done, or lost in this very command."""
        due = []
        for data, cell in plan.contenders() if "train" in phases else []:
            who, tries = f"{data}/{cell}", plan.tries(data, cell)
            found = [results[at] for job in tries if (at := place_of(NAME, job)) in results]
            settled = found and len(found) + sum(job.key in lost for job in tries) == len(tries)
            if who in begun or not (settled or who in plan.chosen):
                continue
            begun.add(who)
            plan.chosen.setdefault(who, settled and best_rate(found))
            plan.write(folder)
            due.append((NAME, plan.job(data, cell, plan.chosen[who], tuning=False)))
        return due

    tries = [
        (NAME, job)
        for data, cell in plan.contenders()
        if "tune" in phases and f"{data}/{cell}" not in plan.chosen
        for job in plan.tries(data, cell)
    ]
    on_gpu = pick_device(plan.device).type == "cuda"
    with shared_gpu() if on_gpu else nullcontext(False) as shared:
        way = "at the same time (MPS)" if shared else "in turns"
        print(f"{', '.join(phases)}: up to {plan.processes} runs, kernels {way}", flush=True)
        sweep(folder, tries, launch, more=more)


def best_rate(tries: Sequence[Result]) -> float:
    """A rate that diverged is the last choice, a loss that is no number too."""

    def rank(one: Result) -> tuple[bool, float]:
        nats = one["validation_nats"]
        return bool(one.diverged), nats if math.isfinite(nats) else math.inf

    return float(min(tries, key=rank)["rate"])


# ----------------------------------------------------------------------------------------- table


def state_of(folder: Path, job: Job, result: Result | None) -> dict[str, Any]:
    """How far a run is, and what went wrong."""
    (work,) = collect([(NAME, job)])
    place = folder / work.place
    trace = place.with_name(place.name + ".error.txt")
    lines = MetricsFile(place / "metrics.jsonl").read()
    done = job.config.bptt.steps if result else (lines[-1]["step"] if lines else 0)
    state = {"folder": str(place), "steps": job.config.bptt.steps, "step": done, "state": "done"}
    if result is None:
        state["state"] = "failed" if trace.exists() else "to go on" if done else "to begin"
    if result is None and trace.exists():
        state |= {"log": str(trace), "tail": trace.read_text().splitlines()[-12:]}
    return state | (
        {"state": "diverged", "why": result.diverged} if result and result.diverged else {}
    )


def summary(plan: Plan, folder: Path) -> dict[str, Any]:
    """Everything that is known, for beside.json."""
    setup, figure = Setup(scale="paper", folder=folder), Beside()
    runs, results = [], []
    for job in [*figure.grid(setup), *figure.follow_up(setup, [])]:
        (result,) = results_of(folder, [(NAME, job)]) or [None]
        results += [result] if result else []
        known = {"measured": result.measured, "cost": result.cost} if result else {}
        known |= {"curve": result.curve} if result else {}
        runs.append({**job.tags, **state_of(folder, job, result), **known})
    save(figure.plot(setup, results), folder / "beside.png")
    verdict = asdict(figure.verdict(setup, results))
    return {"protocol": __doc__, "plan": asdict(plan), "verdict": verdict, "runs": runs}


def table(record: Mapping[str, Any]) -> str:
    """The full runs and what they are to be compared with, as Markdown."""
    plan = record["plan"]
    lines = [
        "| data | trained by | nats | state | rate | steps | tokens | sequential operations | "
        "ms a step, alone | seconds |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for data, seconds in plan["seconds"].items():
        if data in plan["ours"]:
            one = plan["ours"][data]
            counts = f"{one['steps']:,} | {one['tokens']:,} | {one['sequential_ops']:,}"
            lines.append(
                f"| {data} | {OURS} | {one['nats']:.4f} | done | | {counts} | | {one['seconds']:.0f} |"
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
                f"| {data} | {TITLES[run['cell']]} | {nats} | {run['state']} | {run['rate']:g} | "
                f"{counts} | {step:.1f} | {seconds:g} |"
            )
        if counted:
            name = min(counted, key=lambda one: counted[one])
            lines.append(
                f"| {data} | best count model ({name}) | {counted[name]:.4f} | | | | | | | |"
            )
    lines += ["", "Nats on held-out documents that chose the learning rate:", ""]
    for run in record["runs"]:
        if run["tuning"]:
            nats = run.get("measured", {}).get("validation_nats")
            told = f"{nats:.4f}" if nats is not None and run["state"] == "done" else run["state"]
            lines.append(f"- {run['data']}, {TITLES[run['cell']]}, {run['rate']:g}: {told}")
    lines += [
        f"- failed: {run['log']}: {run['tail'][-1]}" for run in record["runs"] if "tail" in run
    ]
    lines += [
        f"- {cell} was not timed: {one['error']}"
        for cell, one in plan["timed"].items()
        if "error" in one
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------- command line


def pairs(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, several times."""
    for text in texts:
        if text.partition("=")[0] not in known or not text.partition("=")[2]:
            raise MemtrainError(
                f"{option} {text}: must be NAME=VALUE, NAME one of {', '.join(known)}"
            )
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def numbers(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, value in pairs(texts, option, known).items():
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            raise MemtrainError(f"{option} {name}={value}: must be a number of seconds above 0")
    return found


def evaluated(path: Path, sequences: int) -> dict[str, Any]:
    """What `memtrain eval` says of a run of SMT -> DMT."""
    try:
        said = json.loads(path.read_text())
        found = {
            name: said[f"total_{name}"] for name in ("steps", "tokens", "sequential_ops", "seconds")
        }
        found |= {"nats": said["rnn"]["nats"], "length": said["length"], "run": said["run"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemtrainError(f"--ours {path}: not what `memtrain eval` leaves ({error})") from None
    if said["sequences"] != sequences:
        raise MemtrainError(
            f"--ours {path}: looked at {said['sequences']} sequences, here they are {sequences}; "
            f"memtrain eval {said['run']} --sequences {sequences}"
        )
    return found


def make_plan(options: argparse.Namespace) -> Plan:
    """The folder's plan with what the options add; what was planned before is not changed."""
    fixed = {
        "size": options.size,
        "data_dir": str(options.data_dir),
        "device": options.device,
        "sequences": options.sequences,
        "processes": options.processes,
    }
    if (options.folder / "plan.json").is_file():
        plan = Plan.read(options.folder)
        given = {name: value for name, value in fixed.items() if value not in (None, "None")}
    else:
        usual = {"size": "paper", "data_dir": "data", "device": "auto", "sequences": 512}
        usual["processes"] = 12
        given = {n: usual[n] if v in (None, "None") else v for n, v in fixed.items()}
        plan = Plan(**given, rates=RATES)
    for name, value in given.items():
        if getattr(plan, name) != value:
            raise MemtrainError(
                f"--{name.replace('_', '-')} {value}: {options.folder} was planned with "
                f"{getattr(plan, name)}; take another --folder"
            )
    for data, path in pairs(options.ours, "--ours", DATA).items():
        plan.ours[data] = evaluated(Path(path), plan.sequences)
    budgets = {data: one["seconds"] for data, one in plan.ours.items()}
    budgets |= plan.seconds | numbers(options.seconds, "--seconds", DATA)
    for data, seconds in budgets.items():
        if plan.seconds.get(data, seconds) != seconds:
            raise MemtrainError(
                f"--seconds {data}={seconds:g}: {options.folder} was planned with "
                f"{plan.seconds[data]:g}; take another --folder"
            )
        check_documents(plan, data)
    plan.seconds = budgets
    for cell, seconds in numbers(options.step, "--step", list(RATES)).items():
        plan.timed.setdefault(cell, {"seconds": seconds, "given": True, "recompute": True})
    if not plan.seconds:
        raise MemtrainError("--seconds: name a data set and its budget, for example mnist=400")
    plan.write(options.folder)
    return plan


def check_documents(plan: Plan, data: str) -> None:
    """Whether there are enough held-out documents, before any time is spent."""
    config = plan.base(data, "gru").data
    assert isinstance(config, Stream)
    store = open_store(Path(config.path))
    last = len(store.tokens("test")) - config.evaluate_length
    there = int((np.array(store.starts("test")) < last).sum())
    if there < 2 * plan.sequences:
        raise MemtrainError(
            f"--sequences {plan.sequences}: {config.path} has {there} held-out sequences, and half "
            f"of them choose the learning rate; at most {there // 2}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="*", help=f"of {', '.join(PHASES)}; all unless given")
    parser.add_argument("--folder", type=Path, default=Path("runs/beside"))
    parser.add_argument("--seconds", nargs="+", default=[], metavar="DATA=S", help="the budgets")
    parser.add_argument(
        "--ours",
        nargs="+",
        default=[],
        metavar="DATA=JSON",
        help="of memtrain eval; also the budget, if --seconds gives none",
    )
    parser.add_argument(
        "--step", nargs="+", default=[], metavar="CELL=S", help="seconds of a step, timed before"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="then save and stop")
    parser.add_argument("--processes", type=int, help="runs that share the device (12)")
    parser.add_argument("--sequences", type=int, help="held-out, for the evaluation (512)")
    parser.add_argument("--size", help="of the models (paper)")
    parser.add_argument("--data-dir", type=Path, help="holds what `memtrain data` prepared (data)")
    parser.add_argument("--device", help="auto, cpu, cuda")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

    def over() -> bool:
        return bool(asked) or time.monotonic() > ends

    phases = options.phases or list(PHASES)
    try:
        for phase in phases:
            if phase not in PHASES:
                raise MemtrainError(f"{phase}: must be one of {', '.join(PHASES)}")
        plan = make_plan(options)
        if "time" in phases:
            time_steps(plan, options.folder)
        working = [phase for phase in ("tune", "train") if phase in phases]
        if working and not over():
            learn(plan, options.folder, working, over)
        record = summary(plan, options.folder)
    except MemtrainError as error:
        print(f"beside: {error}", file=sys.stderr)
        return 2
    write_whole(options.folder / "beside.json", (json.dumps(record) + "\n").encode())
    write_whole(options.folder / "beside.md", (table(record) + "\n").encode())
    print(table(record))
    states = [run["state"] for run in record["runs"]]
    untimed = sum("error" in one for one in plan.timed.values())
    print(f"\n{options.folder}/beside.json; {', '.join(sorted(set(states)))}")
    return 1 if "failed" in states or untimed else 0


if __name__ == "__main__":
    sys.exit(main())
