"""Record the results of training, bit-exact, and check later that they are unchanged.

    python scripts/goldens.py write tests/goldens/cpu.json
    python scripts/goldens.py check tests/goldens/cpu.json
    python scripts/goldens.py check tests/goldens/cpu.json --only 'stream/*' --close 1e-5

A case is a tiny run on a CPU, in fp32 with one thread, 20 steps per stage. Of each the file holds
the losses, their parts and the gradient norms of every step and the evaluation after each stage,
as hexadecimal floats, the checksum of the final weights and, where the model can generate, sampled
tokens. A case that tests an option ends with the last stage that the option changes. Only
the public API and files of run folders are used: the golden file outlives any reorganisation of the
package.
"""

import argparse
import fnmatch
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import memtrain
from memtrain.config import (
    Arithmetic,
    BPTTConfig,
    CellConfig,
    Copy,
    Custom,
    Digits,
    DMTConfig,
    EngineConfig,
    LogConfig,
    Recall,
    Retrieval,
    RunConfig,
    SMTConfig,
    Stack,
    Stream,
    TeacherConfig,
)

STEPS = 20
IGNORED = {"stage", "step", "total_steps", "total_seconds"}
"""Fields of a line of metrics that are not compared."""
GENERATED = 24
"""Tokens to generate, greedily."""


# ---------------------------------------------------------------------------------------- cases

LONE, DOCUMENTS, WORDS = "lone", "documents", "words"
"""The streams: one sequence of tokens, documents of one length, and text."""

TRANSFORMER = CellConfig(memory_tokens=2, memory_dim=16, width=16, layers=2, heads=2, head_dim=8)
CELLS = {
    "transformer": TRANSFORMER,
    "mlp": CellConfig(kind="mlp", memory_tokens=2, memory_dim=16, width=24, layers=2),
    "gru": CellConfig(kind="gru", memory_tokens=2, memory_dim=16),
    "lstm": CellConfig(kind="lstm", memory_tokens=4, memory_dim=16),
}
BASE = RunConfig(
    name="golden",
    seed=3,
    data=Copy(sequence_length=12, vocab_size=6),
    teacher=TeacherConfig(
        context_length=8, width=16, encoder_layers=2, decoder_layers=2, heads=2, head_dim=8
    ),
    cell=TRANSFORMER,
    smt=SMTConfig(steps=STEPS, batch_size=8, timesteps=4, future_length=6, learning_rate=1e-2),
    dmt=DMTConfig(steps=STEPS, batch_size=8, learning_rate=3e-3, rollout_length=10),
    bptt=BPTTConfig(steps=STEPS, batch_size=8, learning_rate=3e-3, sequence_length=12),
    engine=EngineConfig(device="cpu", precision="fp32", threads=1),
    log=LogConfig(every=1, evaluate_every=0, evaluate_sequences=8, checkpoint_every=10**6),
)
PRETRAIN: dict[str, Any] = {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-2}
STREAM = Stream(path=LONE, evaluate_length=16)
ON_STREAM: dict[str, Any] = {"data": STREAM, "smt": {"timesteps": 1, "batch_size": 16}}


class Parity(memtrain.Task):
    """Predict whether the number of ones so far is odd."""

    vocab_size, sequence_length = 2, 12

    def sample(self, count: int, generator: torch.Generator) -> memtrain.Batch:
        bits = torch.randint(2, (count, self.sequence_length), generator=generator)
        return memtrain.Batch(bits, bits.cumsum(1) % 2)


class Dropping(memtrain.Cell):
    """A user cell with dropout, which uses torch's global RNG."""

    memory_tokens, memory_dim = 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 16)
        self.mix = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        x = memory + self.embedding(token)[:, None]
        return nn.functional.rms_norm(x + self.dropout(torch.tanh(self.mix(x))), (16,))


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    config: RunConfig
    own: bool = False
    """Train the user task and cell above instead of those of the config."""
    stopped: tuple[str, ...] = ()
    """Stages in which the run ends with an error, and is resumed from its last checkpoint."""


def changed(config: RunConfig, options: dict[str, Any]) -> RunConfig:
    """Replace fields of a config; a dict replaces fields of a nested config."""
    values = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in options.items()
    }
    return replace(config, **values)


def cases() -> dict[str, Case]:
    """All cases by name."""
    found = {case.name: case for case in _all_cases()}
    assert len(found) == len(list(_all_cases()))
    return found


def _all_cases() -> Iterator[Case]:
    yield from _grid()
    yield from _tasks()
    yield from _options()
    yield from _plain()


def _case(name: str, *changes: dict[str, Any], **more: Any) -> Case:
    config = BASE
    for change in changes:
        config = changed(config, change)
    return Case(name, config, **more)


def _grid() -> Iterator[Case]:
    """Every encoder with every cell, on a task and on a stream, through all stages."""
    for encoder in ("bidirectional", "causal"):
        for kind, cell in CELLS.items():
            models = {
                "teacher": {"encoder": encoder, "normalize_memory": kind not in ("gru", "lstm")},
                "cell": cell,
            }
            yield _case(f"task/{encoder}/{kind}", models)
            yield _case(f"stream/{encoder}/{kind}", ON_STREAM, models)


def _tasks() -> Iterator[Case]:
    """The other tasks and streams; a user task and a user cell; resumed runs."""
    causal = {"teacher": {"encoder": "causal"}}
    for data in (
        Retrieval(sequence_length=10, vocab_size=5, needle_within=1.0),
        Retrieval(sequence_length=10, vocab_size=5, noise=0.2, needle_within=0.5),
        Stack(sequence_length=10, vocab_size=5, depth=3),
        Recall(pairs=3, key_length=2, value_length=2, key_symbols=4, value_symbols=4),
        Arithmetic(vocab_size=5, examples=4, difficulty=4),
    ):
        noisy = "-noisy" if getattr(data, "noise", 0) else ""
        yield _case(f"data/{data.kind}{noisy}", causal, {"data": data})
    short = {"dmt": {"rollout_length": 12}, "smt": {"timesteps": 6, "decode_timesteps": 3}}
    digits = {"data": Digits(), "dmt": {**short["dmt"], "empty_start": 0.5}}
    yield _case("data/digits", causal, short, digits)
    for path in (DOCUMENTS, WORDS):
        data = replace(STREAM, path=path)
        yield _case(f"data/{path}", causal, ON_STREAM, {"data": data})
        apart = replace(data, cross_documents=False, document_starts=0.8)
        yield _case(f"data/{path}-apart", causal, ON_STREAM, {"data": apart})
    yield _case("own", causal, {"cell": CellConfig(), "bptt": {"recompute": 4}}, own=True)
    yield _case("own/accumulate", {"smt": {"accumulate": 2}}, own=True)
    log = {"log": {"checkpoint_every": 8}}
    yield _case("resumed/task", log, stopped=("smt", "dmt", "bptt"))
    yield _case(
        "resumed/two-stages",
        {"pretrain": PRETRAIN, "smt": {"train_teacher": False}, "dmt": {"train_teacher": True}},
        {**log, "bptt": {"steps": 0}},
        stopped=("pretrain", "smt", "dmt"),
    )
    yield _case("resumed/stream", ON_STREAM, causal, log, stopped=("smt", "dmt", "bptt"))


def _options() -> Iterator[Case]:
    """Options with separate code paths, with both encoders or on both kinds of data."""
    bidirectional, causal = {}, {"teacher": {"encoder": "causal"}}
    cell_steps = {"smt": {"dynamics_steps": 3}}
    options: dict[str, dict[str, Any]] = {
        "separate": {"smt": {"joint": False}},
        "all-timesteps": {"smt": {"timesteps": 0}},
        "one-timestep": {"smt": {"timesteps": 1, "short_contexts": 0.5}},
        "decode-timesteps": {"smt": {"decode_timesteps": 2}},
        "no-start": {"smt": {"learn_start": False}},
        "start-weight": {"smt": {"start_weight": 3.0}, "dmt": {"start_weight": 3.0}},
        "noise": {"smt": {"memory_noise": 0.3}},
        "dynamics-steps": cell_steps,
        "normalized": {"smt": {"normalize_dynamics": True}},
        "next": {"smt": {"next_weight": 0.5}},
        "few-uniform": {"smt": {"uniformity_samples": 16, "uniformity_weight": 0.1}},
        "accumulate": {
            stage: {"accumulate": 2, "batch_size": 16} for stage in ("smt", "dmt", "bptt")
        },
        "accumulate-noise": {
            "smt": {"accumulate": 2, "memory_noise": 0.3, "uniformity_samples": 16},
            "dmt": {"accumulate": 2, "decode_weight": 1.0, "future_length": 4},
            "bptt": {"accumulate": 2, "recompute": 4},
        },
        "through-time": {"dmt": {"through_time": True, "label_stride": 3}, "bptt": {"truncate": 5}},
        "decode": {
            "dmt": {
                "decode_weight": 1.0,
                "future_length": 4,
                "label_stride": 3,
                "readout_stride": 2,
                "segment": 4,
                "empty_start": 0.5,
            },
            "bptt": {"recompute": 4, "truncate": 6},
        },
        "taught-start": {"dmt": {"empty_start": 0.0, "rollout_length": 4}},
        "two-stages": {"pretrain": PRETRAIN, "smt": {"train_teacher": False}},
        "training-teacher": {
            "dmt": {"train_teacher": True, "future_length": 4, "label_stride": 3},
        },
        "two-stages-accumulate": {
            "pretrain": {**PRETRAIN, "accumulate": 2},
            "smt": {"train_teacher": False, "accumulate": 2},
            "dmt": {"train_teacher": True, "accumulate": 2, "uniformity_samples": 16},
        },
        "schedule": {
            "smt": {"schedule": "cosine", "warmup": 0.2, "clip_norm": 0.1, "weight_decay": 0.1},
            "dmt": {"schedule": "constant", "betas": (0.8, 0.9)},
        },
    }
    for name, change in options.items():
        models = causal if name in ("noise", "next") else bidirectional
        yield _case(f"task/{name}", models, change, _without_rest(change))
    both = ("separate", "noise", "dynamics-steps", "accumulate-noise", "decode")
    for name in (*both, "two-stages", "training-teacher"):
        change = options[name]
        yield _case(f"stream/{name}", ON_STREAM, causal, change, _without_rest(change))
    smt_alone = _without_rest(cell_steps)
    yield _case("stream/few-rows", ON_STREAM, causal, {"smt": {"batch_size": 4}}, smt_alone)
    yield _case("stream/all-timesteps", ON_STREAM, causal, options["all-timesteps"], smt_alone)
    tokens = {"smt": {"token_weight": 0.5, "next_weight": 0.5}}
    yield _case("task/token", causal, tokens, smt_alone)
    yield _case("stream/token", ON_STREAM, causal, tokens, {"smt": {"timesteps": 4}}, smt_alone)
    shared = {"smt": {"accumulate": 2}}
    yield _case("stream/token-accumulate", ON_STREAM, causal, tokens, shared, smt_alone)
    for kind in ("mlp", "gru"):
        cell = {"cell": CELLS[kind]}
        yield _case(f"task/dynamics-steps/{kind}", cell_steps, cell, smt_alone)
        yield _case(f"task/decode/{kind}", causal, options["decode"], cell)
    yield _case("task/void", {"teacher": {"padding": "void"}}, smt_alone)
    yield _case("stream/void", ON_STREAM, {"teacher": {"padding": "void"}}, smt_alone)
    yield _case("task/projected", causal, {"cell": {"memory_dim": 12, "memory_tokens": 3}})
    shallow = {"encoder": "causal", "encoder_layers": 1, "decoder_layers": 1}
    yield _case("task/shallow", {"teacher": shallow, "cell": {"layers": 1}})
    half = {"rotary_fraction": 0.5}
    authors = {"teacher": {**half, "head_bias": True}, "cell": half}
    yield _case("task/authors", authors)
    yield _case("stream/authors", ON_STREAM, causal, authors)
    yield _case("task/loose", {"teacher": {"normalize_memory": False}})
    yield _case("task/readout", {"readout_attention": "bidirectional"})
    alone = {"smt": {"steps": 0}, "dmt": {"steps": 0}}
    yield _case("task/bptt-alone", alone, {"bptt": {"schedule": "cosine"}})
    yield _case("stream/bptt-alone", ON_STREAM, alone, {"bptt": {"truncate": 5}})
    yield _case("stream/bptt-pieces", ON_STREAM, alone, {"bptt": {"truncate": 5, "sweeps": 1}})


def _without_rest(change: dict[str, Any]) -> dict[str, Any]:
    """Leave out the stages after the last one that a change concerns."""
    names = ("pretrain", "smt", "dmt", "bptt")
    last = max(names.index(stage) for stage in change)
    return {stage: {"steps": 0} for stage in names[last + 1 :]}


def _plain() -> Iterator[Case]:
    """Runs without the CPU's fast paths."""
    causal, plain = {"teacher": {"encoder": "causal"}}, {"engine": {"fast": False}}
    several = {"smt": {"dynamics_steps": 3, "token_weight": 0.5}, "dmt": {"through_time": True}}
    yield _case("plain/task", causal, plain)
    yield _case("plain/task/several", causal, plain, several)
    yield _case("plain/task/bidirectional", plain)
    yield _case("plain/task/gru", plain, {"cell": CELLS["gru"]})
    yield _case("plain/stream", ON_STREAM, causal, plain)


# ----------------------------------------------------------------------------------------- data


def make_streams(folder: Path) -> None:
    """Prepare the streams of the cases with the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.RandomState(0)  # stable across NumPy versions
    tokens = np.zeros(1200, np.uint8)
    for i in range(1, len(tokens)):  # mostly predictable from the past
        rule = (2 * tokens[i - 1] + tokens[i // 2] + 1) % 7
        tokens[i] = rule if draws.randint(5) else draws.randint(7)
    np.save(folder / f"{LONE}.npy", tokens)
    np.save(folder / f"{DOCUMENTS}.npy", tokens.reshape(-1, 30))
    lines = ["".join("abc de "[token] for token in row) for row in tokens.reshape(-1, 30)]
    rows = [json.dumps({"text": line[: 16 + i % 14]}) for i, line in enumerate(lines)]
    (folder / f"{WORDS}.jsonl").write_text("\n".join(rows) + "\n")
    source = str(Path(memtrain.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    for file in (f"{LONE}.npy", f"{DOCUMENTS}.npy", f"{WORDS}.jsonl"):
        out = folder / Path(file).stem
        subprocess.run(
            [sys.executable, "-m", "memtrain", "data", str(folder / file), "--out", str(out)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
            check=True,
        )


# ----------------------------------------------------------------------------------------- runs


class _Stopped(BaseException):
    """Interrupts a training."""


class _Stopping(memtrain.Reporter):
    """Ends the training after some steps of a stage."""

    def __init__(self, name: str) -> None:
        self.name, self.now = name, ""

    def stage(self, name: str, step: int, steps: int) -> None:
        self.now = name

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if self.now == self.name and step == STEPS // 2 + 3:
            raise _Stopped


def train(case: Case, streams: Path, folder: Path) -> dict[str, Any]:
    """Train a case in a folder; return its entry of the golden file."""
    torch.set_num_threads(1)
    config = case.config
    if isinstance(config.data, Stream):
        config = replace(config, data=replace(config.data, path=str(streams / config.data.path)))
    own: dict[str, Any] = {}
    if case.own:
        torch.manual_seed(0)
        own = {"task": Parity(), "cell": Dropping()}
        config = replace(config, data=Custom(), cell=CellConfig())
    run = memtrain.Run.create(config, folder, **own)
    for stage in case.stopped:
        try:
            run.train(_Stopping(stage))
        except _Stopped:
            run = memtrain.Run.open(folder, **own)
        else:
            raise AssertionError(f"{case.name}: was not stopped in {stage}")
    run.train(memtrain.Reporter())
    found = {
        "stages": _curves(folder / "metrics.jsonl"),
        "weights": _weights(folder),
    }
    if not case.own:
        model = memtrain.load_rnn(folder)
        if model.spelling is not None:
            length = None if model.spelling.picture else GENERATED
            written = memtrain.generate(model, length=length, temperature=0.0)
            found["written"] = " ".join(map(str, written.tokens[0].tolist()))
    return found


def _curves(path: Path) -> dict[str, dict[str, str]]:
    """Per stage, every number of metrics.jsonl against the step, with spaces between."""
    stages: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        curves = stages.setdefault(record["stage"], {})
        numbers = {key: record[key] for key in record.keys() - IGNORED - {"evaluation"}}
        numbers |= dict(_numbers("evaluation", record.get("evaluation")))
        for key, value in sorted(numbers.items()):
            curve = curves.setdefault(key, [])
            # Counters grow linearly: the last value is enough.
            if key.startswith("total_") and curve:
                curve.pop()
            curve.append(_hex(value))
    return {
        stage: {key: " ".join(curve) for key, curve in curves.items()}
        for stage, curves in stages.items()
    }


def _hex(value: float) -> str:
    """Like float.hex, without the trailing zeros of 32-bit floats."""
    mantissa, power, exponent = float(value).hex().partition("p")
    return mantissa.rstrip("0").rstrip(".") + power + exponent if power else mantissa


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of an evaluation by path, without the lists, which bin the same losses."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}.{key}", inner)
    elif isinstance(value, (int, float)):
        yield name, value


def _weights(folder: Path) -> dict[str, str]:
    """Checksums of the tensors of RNN and teacher in the newest checkpoint, in order of names."""
    newest = max(path for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    tensors = load_file(newest / "weights.safetensors")
    found = {}
    for model in sorted({name.split(".")[0] for name in tensors}):
        digest = hashlib.sha256()
        for name in sorted(name for name in tensors if name.split(".")[0] == model):
            digest.update(name.encode())
            digest.update(tensors[name].contiguous().numpy().tobytes())
        found[model] = digest.hexdigest()
    return found


# --------------------------------------------------------------------------------------- compare


@dataclass(frozen=True)
class Difference:
    """The first difference between a run and its record."""

    where: str
    relative: float
    """Relative difference of the two numbers; nan if something is missing."""

    def __str__(self) -> str:
        return f"{self.where}, relative difference {self.relative:.2g}"


def compare(
    recorded: dict[str, Any], found: dict[str, Any], close: float = 0.0, steps: int = 0
) -> Difference | None:
    """The first difference between two runs, None if there is none.

    Args:
        recorded: what the golden file holds.
        found: what the run gave now.
        close: relative tolerance of the numbers; then weights and written tokens, which may
            differ, are not compared. 0: everything is bit-exact.
        steps: compare only the first steps of the first stage (0: everything).
    """
    if recorded["stages"].keys() != found["stages"].keys():
        return Difference(f"stages {', '.join(found['stages'])}", math.nan)
    for stage, curves in recorded["stages"].items():
        here = found["stages"][stage]
        if missing := sorted(curves.keys() ^ here.keys()):
            return Difference(f"{stage} {missing[0]} is in only one of them", math.nan)
        worst = [
            (step, key, was, now)
            for key, curve in curves.items()
            for step, was, now in _differing(curve.split(), here[key].split(), close, steps)
        ]
        if worst:
            step, key, was, now = min(worst, key=lambda one: (one[0], one[1]))
            return Difference(f"{stage} step {step} {key}", abs(now - was) / (abs(was) or 1))
        if steps:
            return None
    if not close:
        for model, digest in recorded["weights"].items():
            if found["weights"].get(model) != digest:
                return Difference(f"weights of {model}", math.nan)
        if recorded.get("written") != found.get("written"):
            return Difference("written tokens", math.nan)
    return None


def _differing(
    recorded: list[str], found: list[str], close: float, steps: int
) -> Iterator[tuple[int, float, float]]:
    """Yield the steps at which a curve differs; a single point belongs to the last step."""
    if len(recorded) != len(found):
        yield min(len(recorded), len(found)), math.nan, math.nan
        return
    single = len(recorded) == 1
    if single and steps:
        return
    chosen = slice(steps or None)
    pairs = zip(recorded[chosen], found[chosen], strict=True)
    for step, (was, now) in enumerate(pairs, start=STEPS if single else 1):
        first, second = float.fromhex(was), float.fromhex(now)
        same = was == now or (close and math.isclose(first, second, rel_tol=close, abs_tol=1e-7))
        if not same:
            yield step, first, second


def machine() -> dict[str, Any]:
    """Hardware and versions that the last bits depend on."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if "model name" in line), model)
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": model,
        "threads": 1,
    }


# -------------------------------------------------------------------------------------- commands


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="shell pattern of case names"
    )
    parser.add_argument(
        "--close",
        type=float,
        default=0.0,
        metavar="R",
        help="relative tolerance instead of bit-exactness",
    )
    options = parser.parse_args()
    chosen = {n: c for n, c in cases().items() if fnmatch.fnmatch(n, options.only)}
    if not chosen:
        parser.error(f"--only {options.only}: no such case; there are {', '.join(cases())}")
    golden = json.loads(options.file.read_text()) if options.file.exists() else {"cases": {}}
    if options.command == "check" and not golden["cases"]:
        parser.error(f"{options.file}: holds no goldens")
    print(f"memtrain of {Path(memtrain.__file__).parent}", flush=True)
    found, different, began = {}, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        make_streams(Path(place) / "streams")
        for name, case in chosen.items():
            found[name] = train(case, Path(place) / "streams", Path(place) / name)
            if options.command == "check":
                if name not in golden["cases"]:
                    difference: object = "not recorded"
                else:
                    difference = compare(golden["cases"][name], found[name], options.close)
                different += difference is not None
                print(f"{name:<32} {difference or 'equal'}", flush=True)
    seconds = time.monotonic() - began
    if options.command == "write":
        golden = {"machine": machine(), "cases": {**golden["cases"], **found}}
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(golden, indent=1) + "\n")
        print(f"{options.file}: {len(found)} cases in {seconds:.0f} s")
        return 0
    if gone := sorted(
        n for n in golden["cases"] if n not in cases() and fnmatch.fnmatch(n, options.only)
    ):
        print(f"recorded, but no longer a case: {', '.join(gone)}")
    if machine() != golden["machine"]:
        print(f"recorded on {golden['machine']}, this is {machine()}: bits may differ")
    print(f"{len(found) - different} of {len(found)} cases equal, in {seconds:.0f} s")
    return int(different > 0 or bool(gone))


if __name__ == "__main__":
    sys.exit(main())
