"""SMT -> DMT beside BPTT (Transformer cell, and a GRU of equal size) under the same wall-clock.

    python scripts/bptt_comparison.py --seconds mnist=400 tinystories=400 sketchy=356 --minutes 9
    python scripts/bptt_comparison.py --minutes 9  # continues where it stopped
    python scripts/bptt_comparison.py table --ours mnist=runs/mnist/figures/evaluation-784.json

Runs share the GPU, where a clock would lie, so BPTT gets steps instead of seconds:

time   A BPTT step of each cell is timed alone on the device, after compilation and capture, keeping
       everything for the backward pass, which is its fastest form. Tokens are random, as many
       symbols as text has. A contender's steps are the data set's seconds over these: start-up,
       evaluation and saving are free of charge.
tune   Three learning rates each for a fifth of the steps, warm-up and cosine over that fifth,
       seed 0. The best has the lowest nats from the empty memory on held-out documents, a fifth as
       many as the evaluation's, that come after those in its own order, so that they share none.
train  All steps at the best rate, warm-up and cosine as the recipe has them. Data, models, batch,
       length and the share of windows that begin documents are the recipe's. Runs that would not
       fit beside each other wait; one whose step was given and not timed has the device alone.
       Then, as `memtrain eval --sequences N`: nats from the empty memory over whole sequences
       at the last step, count models; and 16 pictures or texts, FOLDER/samples.
table  FOLDER/beside.json, beside.md and beside.png, of what there is. With --ours also the runs
       of SMT -> DMT, from the JSON that `memtrain eval RUN --sequences N` left: 512, and of
       Sketchy, which has fewer held out, 256. Rates are chosen with seed 0; --seeds trains
       others too.

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
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bptt_comparison_plan import BPTTComparison, Plan, check_documents, summary, table

from memtrain.accel.engine import pick_device
from memtrain.bench.cases import FOREVER, Case
from memtrain.bench.measure import machine, time_case
from memtrain.errors import MemtrainError
from memtrain.files import write_atomic
from memtrain.paper.base import Experiment, Job, Result
from memtrain.paper.job import Event, Work
from memtrain.paper.results import ResultId
from memtrain.paper.sweep import results_of, sweep
from memtrain.paper.workers import run_locally, shared_gpu

PHASES = ("time", "tune", "train", "table")
DATA = ("mnist", "tinystories", "sketchy")
RATES = {"transformer": [1e-4, 3e-4, 1e-3], "gru": [3e-4, 1e-3, 3e-3]}
USUAL = {"size": "paper", "data_dir": "data", "device": "auto"}
"""What a new plan has unless told otherwise."""
PROCESSES = 3
"""Runs that share the device. More are slower: on an H200 two Transformers that recompute took 2.4
steps a second together, eight of them 1.7; a single one that keeps everything takes 2.7."""
SEQUENCES = {"mnist": 512, "tinystories": 512, "sketchy": 256}
"""Held-out documents of the evaluation; of Sketchy there are few."""


def measure_step(plan: Plan, data: str, cell: str, seconds: float) -> dict[str, Any]:
    """Seconds of a BPTT step that keeps everything, on a device that does nothing else."""
    config = plan.base(data, cell)
    stage = replace(config.bptt, steps=FOREVER, recompute=0)
    tokens = stage.batch_size * stage.sequence_length
    config = replace(config, bptt=stage)
    case = Case(suite="bptt", label=cell, batch=stage.batch_size, tokens=tokens, config=config)
    timing = time_case(case, config.engine, seconds)
    device = pick_device(plan.device)
    share = 0.0
    if timing.peak_bytes:
        share = timing.peak_bytes / torch.cuda.get_device_properties(device).total_memory
    shape = {"batch": stage.batch_size, "length": stage.sequence_length, "device": machine(device)}
    return asdict(timing) | shape | {"share": share}


def time_steps(plan: Plan, folder: Path, seconds: float) -> None:
    """Each cell in a process of its own, so that this one never holds the device."""
    for cell in plan.rates:
        if "seconds" in plan.timed.get(cell, {}):
            continue
        print(f"time: {cell}, alone on the device", flush=True)
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                data = next(iter(plan.seconds))  # of which only the recipe is used
                found = alone.submit(measure_step, plan, data, cell, seconds).result()
            print(f"  {1000 * found['seconds']:.1f} ms a step, start-up {found['start_up']:.0f} s")
        except Exception as error:  # the other cell goes on
            found = {"error": f"{type(error).__name__}: {error}"}
            print(f"  failed: {found['error']}")
        plan.timed[cell] = found
        plan.write(folder)


def learn(
    plan: Plan,
    folder: Path,
    phases: Sequence[str],
    over: Callable[[], bool],
    only: Sequence[str] = DATA,
    processes: int = PROCESSES,
) -> None:
    """Tune, and train what is tuned, in one sweep: nobody waits for the slowest."""
    contenders = [(data, cell) for data, cell in plan.contenders() if data in only]
    begun: set[str] = set()
    figure = BPTTComparison()

    def fits(work: Work, others: Sequence[Work]) -> bool:
        return plan.fit([str(one.requests[0].tags["cell"]) for one in (work, *others)])

    def launch(queue: deque[Work]) -> Iterator[Event]:
        return run_locally(queue, folder, processes, over, fits)

    def more(results: Mapping[ResultId, Result]) -> list[tuple[Experiment, Job]]:
        """The full runs of contenders whose tries are all done."""
        due = []
        for data, cell in contenders if "train" in phases else []:
            who, tries = f"{data}/{cell}", plan.tries(data, cell)
            found = results_of(results, figure, tries)
            if who not in plan.chosen and len(found) == len(tries):
                plan.chosen[who] = best_rate(found)
                plan.write(folder)
            if who not in begun and (runs := plan.full_runs(data, cell)):
                begun.add(who)
                due += [(figure, job) for job in runs]
        return due

    tries = [
        (figure, job)
        for data, cell in contenders
        if "tune" in phases and f"{data}/{cell}" not in plan.chosen
        for job in plan.tries(data, cell)
    ]
    on_gpu = pick_device(plan.device).type == "cuda"
    with shared_gpu() if on_gpu else nullcontext(False) as shared:
        way = "at the same time (MPS)" if shared else "in turns"
        print(f"{', '.join(phases)}: up to {processes} runs, kernels {way}", flush=True)
        sweep(folder, tries, launch, more=more)


def best_rate(tries: Sequence[Result]) -> float:
    """A rate that diverged is the last choice, a loss that is no number too."""

    def rank(one: Result) -> tuple[bool, float]:
        nats = one["validation_nats"]
        return bool(one.diverged), nats if math.isfinite(nats) else math.inf

    return float(min(tries, key=rank)["rate"])


# --------------------------------------------------------------------------------- command line


def pairs(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, several times."""
    for text in texts:
        if text.partition("=")[0] not in known or not text.partition("=")[2]:
            raise MemtrainError(
                f"{option} {text}: must be NAME=VALUE, NAME one of {', '.join(known)}"
            )
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def amounts(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, float]:
    """NAME=SECONDS, several times."""
    return {name: positive(value, option) for name, value in pairs(texts, option, known).items()}


def counts(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, int]:
    """NAME=N, several times."""
    return {name: round(n) or 1 for name, n in amounts(texts, option, known).items()}


def learning_rates(texts: Sequence[str]) -> dict[str, list[float]]:
    """CELL=RATE,RATE, several times."""
    found = pairs(texts, "--rates", list(RATES))
    return {
        cell: [positive(one, "--rates") for one in all.split(",")] for cell, all in found.items()
    }


def positive(text: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise MemtrainError(f"{option} {text}: must be a number above 0")
    return number


def unchanged(options: argparse.Namespace, name: str, planned: object, given: object) -> None:
    if planned != given:
        raise MemtrainError(
            f"--{name} {given}: {options.folder} was planned with {planned}; take another --folder"
        )


def evaluated(path: Path, sequences: int) -> dict[str, Any]:
    """What `memtrain eval` says of a run of SMT -> DMT."""
    try:
        said = json.loads(path.read_text())
        found = {
            name: said[f"total_{name}"] for name in ("steps", "tokens", "sequential_ops", "seconds")
        }
        found |= {"nats": said["rnn"]["nats"], "length": said["length"], "run": said["run"]}
        found["seed"] = said.get("seed", "")  # older files do not say
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
    given = {name: getattr(options, name) for name in USUAL if getattr(options, name) is not None}
    if rates := learning_rates(options.rates):
        given["rates"] = RATES | rates
    sequences = counts(options.sequences, "--sequences", DATA)
    if (options.folder / "plan.json").is_file():
        plan = Plan.read(options.folder)
    else:
        plan = Plan(**{"rates": RATES, "sequences": SEQUENCES | sequences, **USUAL, **given})
    for name, value in given.items():
        unchanged(options, name.replace("_", "-"), getattr(plan, name), value)
    for data, count in sequences.items():
        unchanged(options, f"sequences {data}", plan.sequences[data], count)
    for data, paths in pairs(options.ours, "--ours", DATA).items():
        plan.ours[data] = [evaluated(Path(path), plan.sequences[data]) for path in paths.split(",")]
    contenders = [f"{data}/{cell}" for data in DATA for cell in RATES]
    plan.seeds |= counts(options.seeds, "--seeds", contenders)
    budgets = {data: ours[0]["seconds"] for data, ours in plan.ours.items()}
    budgets |= plan.seconds | amounts(options.seconds, "--seconds", DATA)
    for data, seconds in budgets.items():
        unchanged(options, f"seconds {data}", plan.seconds.get(data, seconds), seconds)
        check_documents(plan, data)
    plan.seconds = budgets
    for cell, seconds in amounts(options.step, "--step", list(RATES)).items():
        plan.timed.setdefault(cell, {"seconds": seconds, "given": True, "share": 1.0})
    if not plan.seconds:
        raise MemtrainError("--seconds: name a data set and its budget, for example mnist=400")
    plan.write(options.folder)
    return plan


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
        metavar="DATA=JSON,...",
        help="of memtrain eval, a file a seed; the first is also the budget, without --seconds",
    )
    parser.add_argument(
        "--step", nargs="+", default=[], metavar="CELL=S", help="seconds of a step, timed before"
    )
    parser.add_argument(
        "--rates", nargs="+", default=[], metavar="CELL=R,R", help="learning rates to try"
    )
    parser.add_argument(
        "--seeds", nargs="+", default=[], metavar="DATA/CELL=N", help="train as many (1)"
    )
    parser.add_argument("--only", nargs="+", default=DATA, choices=DATA, help="tune, train these")
    parser.add_argument("--timing", type=float, default=5.0, help="seconds to time steps for")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then save and stop")
    parser.add_argument(
        "--processes", type=int, default=PROCESSES, help=f"runs that share a device ({PROCESSES})"
    )
    parser.add_argument(
        "--sequences", nargs="+", default=[], metavar="DATA=N", help="held out, for the evaluation"
    )
    parser.add_argument("--size", help="of the models (paper)")
    parser.add_argument("--data-dir", help="holds what `memtrain data` prepared (data)")
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
            time_steps(plan, options.folder, options.timing)
        working = [phase for phase in ("tune", "train") if phase in phases]
        if working and not plan.contenders():
            raise MemtrainError("no step was timed: run the phase time, or give --step")
        if working and not over():
            learn(plan, options.folder, working, over, options.only, options.processes)
        record = summary(plan, options.folder, __doc__ or "")
    except MemtrainError as error:
        print(f"beside: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("beside: stopped; the same command goes on", file=sys.stderr)
        return 130
    write_atomic(options.folder / "beside.json", (json.dumps(record) + "\n").encode())
    write_atomic(options.folder / "beside.md", (table(record) + "\n").encode())
    print(table(record))
    states = [run["state"] for run in record["runs"]]
    untimed = sum("error" in one for one in plan.timed.values())
    print(f"\n{options.folder}/beside.json; {', '.join(sorted(set(states)))}")
    return 1 if "failed" in states or untimed else 0


if __name__ == "__main__":
    sys.exit(main())
