"""Compare SMT -> DMT with BPTT (Transformer cell, and a GRU of equal size) in equal seconds.

    python scripts/bptt_comparison.py --seconds mnist=400 tinystories=400 sketchy=356 --minutes 9
    python scripts/bptt_comparison.py --minutes 9  # continues
    python scripts/bptt_comparison.py table --ours mnist=runs/mnist/figures/evaluation-784.json

Runs share the GPU, so wall-clock times would be wrong; BPTT's seconds are converted to steps:

time   Time a BPTT step of each cell alone on the device, on random tokens, after compilation and
       capture, without recomputation (its fastest form). The number of steps is the data set's
       seconds divided by this; start-up, evaluation and saving are not charged.
tune   Train three learning rates each for a fifth of the steps, with warm-up and cosine over that
       fifth and seed 0. The best has the lowest nats from the empty memory on held-out documents: a
       fifth as many as in the evaluation, and after them in its order, so that they share none.
train  Train all steps at the best rate, with the recipe's data, models, batch, length, schedule and
       fraction of windows that start at documents. A run waits until its memory fits; one whose
       step was given by --step has the device to itself. Then evaluate the last step like
       `memtrain eval --sequences N`, with count models, and write 16 images or texts to
       FOLDER/samples.
table  Write FOLDER/beside.json, beside.md and beside.png from the available results. --ours adds
       runs of SMT -> DMT, from the JSON of `memtrain eval RUN --sequences N`: 512, and 256 for
       Sketchy, which has fewer held-out documents. Rates are chosen with seed 0; --seeds trains
       more seeds.

The same command continues, also without --seconds. After --minutes, or on SIGTERM, runs save their
state. A run that fails is reported with its log, and retried next time.
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
from functools import partial
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
from memtrain.paper.results import COSTS, ResultId
from memtrain.paper.sweep import results_of, sweep
from memtrain.paper.workers import run_locally, shared_gpu

PHASES = ("time", "tune", "train", "table")
DATA = ("mnist", "tinystories", "sketchy")
RATES = {"transformer": [1e-4, 3e-4, 1e-3], "gru": [3e-4, 1e-3, 3e-3]}
USUAL = {"size": "paper", "data_dir": "data", "device": "auto"}
"""Defaults of a new plan."""
PROCESSES = 3
"""Runs that share the device. More are slower: on an H200 two Transformers with recomputation took
2.4 steps per second together, eight of them 1.7; a single one without takes 2.7."""
SEQUENCES = {"mnist": 512, "tinystories": 512, "sketchy": 256}
"""Held-out documents of the evaluation; Sketchy has few."""


def measure_step(plan: Plan, data: str, cell: str, seconds: float) -> dict[str, Any]:
    """Time a BPTT step without recomputation, on an otherwise idle device."""
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
    """Time each cell in its own process, so that this one holds no device memory."""
    for cell in plan.rates:
        if "seconds" in plan.timed.get(cell, {}):
            continue
        print(f"time: {cell}, alone on the device", flush=True)
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                data = next(iter(plan.seconds))  # only its recipe is used
                found = alone.submit(measure_step, plan, data, cell, seconds).result()
            print(
                f"  {1000 * found['seconds']:.1f} ms per step, start-up {found['start_up']:.0f} s"
            )
        except Exception as error:  # the other cell is still timed
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
    """Tune, and train what is tuned, in one sweep, so that no process is idle."""
    contenders = [(data, cell) for data, cell in plan.contenders() if data in only]
    begun: set[str] = set()
    figure = BPTTComparison()

    def fits(work: Work, others: Sequence[Work]) -> bool:
        return plan.fit([str(one.requests[0].tags["cell"]) for one in (work, *others)])

    def launch(queue: deque[Work]) -> Iterator[Event]:
        on_gpu = pick_device(plan.device).type == "cuda"
        return run_locally(queue, folder, processes, over, fits, on_gpu)

    def more(results: Mapping[ResultId, Result]) -> list[tuple[Experiment, Job]]:
        """The full runs of contenders whose trials are all finished."""
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
        way = "concurrent (MPS)" if shared else "time-sliced"
        print(f"{', '.join(phases)}: up to {processes} runs, kernels {way}", flush=True)
        sweep(folder, tries, launch, more=more)


def best_rate(tries: Sequence[Result]) -> float:
    """The learning rate with the lowest loss; diverged runs and non-finite losses come last."""

    def rank(one: Result) -> tuple[bool, float]:
        nats = one["validation_nats"]
        return bool(one.diverged), nats if math.isfinite(nats) else math.inf

    return float(min(tries, key=rank)["rate"])


# --------------------------------------------------------------------------------- command line


def pairs(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE, several times."""
    for text in texts:
        if text.partition("=")[0] not in known or not text.partition("=")[2]:
            raise MemtrainError(
                f"{option} {text}: must be NAME=VALUE, NAME one of {', '.join(known)}"
            )
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def amounts(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, float]:
    """Parse NAME=SECONDS, several times."""
    return {name: positive(value, option) for name, value in pairs(texts, option, known).items()}


def counts(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, int]:
    """Parse NAME=N, several times."""
    return {name: round(n) or 1 for name, n in amounts(texts, option, known).items()}


def learning_rates(texts: Sequence[str]) -> dict[str, list[float]]:
    """Parse CELL=RATE,RATE, several times."""
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
            f"--{name} {given}: {options.folder} was planned with {planned}; "
            "choose another --folder"
        )


def evaluated(path: Path, sequences: int) -> dict[str, Any]:
    """The JSON of `memtrain eval` of a run of SMT -> DMT."""
    try:
        record = json.loads(path.read_text())
        found = {name: record[f"total_{name}"] for name in COSTS}
        found |= {"nats": record["rnn"]["nats"], "length": record["length"], "run": record["run"]}
        found["seed"] = record.get("seed", "")  # older files have none
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemtrainError(f"--ours {path}: not written by memtrain eval ({error})") from None
    if record["sequences"] != sequences:
        raise MemtrainError(
            f"--ours {path}: evaluated on {record['sequences']} sequences, not {sequences}; "
            f"memtrain eval {record['run']} --sequences {sequences}"
        )
    return found


def make_plan(options: argparse.Namespace) -> Plan:
    """The folder's plan, extended by the options; earlier settings cannot change."""
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
    parser.add_argument("phases", nargs="*", help=f"any of {', '.join(PHASES)} (all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/beside"))
    several = partial(parser.add_argument, nargs="+", default=[])
    several("--seconds", metavar="DATA=S", help="the time budgets")
    several(
        "--ours",
        metavar="DATA=JSON,...",
        help="from memtrain eval, one file per seed; without --seconds the first sets the budget",
    )
    several("--step", metavar="CELL=S", help="seconds per step, if known")
    several("--rates", metavar="CELL=R,R", help="learning rates to try")
    several("--seeds", metavar="DATA/CELL=N", help="number of seeds (1)")
    several("--sequences", metavar="DATA=N", help="held-out documents of the evaluation")
    parser.add_argument(
        "--only", nargs="+", default=DATA, choices=DATA, help="tune and train only these data sets"
    )
    parser.add_argument("--timing", type=float, default=5.0, help="seconds to time steps")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="save and stop after this time"
    )
    parser.add_argument(
        "--processes", type=int, default=PROCESSES, help=f"runs that share a device ({PROCESSES})"
    )
    parser.add_argument("--size", help="model size (paper)")
    parser.add_argument(
        "--data-dir", help="folder of the data sets prepared by `memtrain data` (data)"
    )
    parser.add_argument("--device", help="auto, cpu, cuda")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))

    def over() -> bool:
        return bool(signals) or time.monotonic() > ends

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
        print(f"bptt_comparison: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bptt_comparison: stopped; the same command continues", file=sys.stderr)
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
