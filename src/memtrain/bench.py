"""Benchmarks: how long a step takes here, fast path and plain reference side by side.

What is trained is noise, since only seconds and bytes count. The reference is the same
mathematics as plain PyTorch runs it: no compilation, no captured graphs, no kernels of our own.
"""

import gc
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memtrain.config import (
    BPTTConfig,
    CellConfig,
    DMTConfig,
    EngineConfig,
    RunConfig,
    SMTConfig,
    TeacherConfig,
)
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.eval.rollout import write
from memtrain.run import Run
from memtrain.shapes import Batch
from memtrain.train.engine import Engine, pick_device
from memtrain.train.trainer import Trainer

SUITES = ("smt", "dmt", "generate", "bptt")


class Noise(Task):
    """Windows of a stream of random tokens, drawn on the device as those of real streams are."""

    def __init__(self, vocab_size: int = 256, length: int = 256, tokens: int = 2**20) -> None:
        self.vocab_size, self.sequence_length = vocab_size, length
        self._tokens = torch.randint(vocab_size, (tokens,), dtype=torch.uint8)

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def to(self, device: torch.device) -> "Noise":
        self._tokens = self._tokens.to(device)
        return self

    def windows(self, length: int, from_nothing: int = 0) -> "Noise":
        task = Noise(self.vocab_size, length, 1)
        task._tokens = self._tokens
        return task

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        last = len(self._tokens) - self.sequence_length
        begin = torch.randint(last, (count, 1), generator=generator, device=generator.device)
        span = torch.arange(self.sequence_length + 1, device=self.device)
        window = self._tokens[begin.to(self.device) + span].long()
        return Batch(window[:, :-1], window[:, 1:])


# ----------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time."""

    suite: str
    label: str
    batch: int
    tokens: int
    """Tokens that one step reads or writes."""
    config: RunConfig


def cases(suite: str, size: str) -> list[Case]:
    """What a suite times at a size."""
    if suite not in SUITES:
        raise MemtrainError(f"suite={suite!r}: must be one of {', '.join(SUITES)}, all")
    paper = size == "paper"
    base = RunConfig(
        name="bench",
        teacher=TeacherConfig(padding="void")
        if paper
        else TeacherConfig(
            padding="void",
            context_length=32,
            width=32,
            encoder_layers=2,
            decoder_layers=1,
            heads=2,
            head_dim=16,
        ),
        cell=CellConfig()
        if paper
        else CellConfig(memory_tokens=4, memory_dim=32, width=32, layers=2, heads=2, head_dim=16),
        smt=SMTConfig(steps=10**6, batch_size=128, future_length=64)
        if paper
        else SMTConfig(steps=10**6, batch_size=16, future_length=8),
    )
    context, future = base.teacher.context_length, base.smt.future_length
    length = 256 if paper else 32
    if suite == "smt":
        batch = base.smt.batch_size
        return [
            Case(
                suite=suite,
                label="SMT step",
                batch=batch,
                tokens=batch * (context + future),
                config=base,
            )
        ]
    if suite == "dmt":
        batch = 32 if paper else 4
        return [
            Case(
                suite=suite,
                label=f"DMT step, labels every {stride}th step"
                if stride > 1
                else "DMT step, all labels",
                batch=batch,
                tokens=batch * length,
                config=replace(
                    base,
                    dmt=DMTConfig(
                        steps=10**6,
                        batch_size=batch,
                        rollout_length=length,
                        empty_start=0.5,
                        label_stride=stride,
                    ),
                ),
            )
            for stride in (16, 1)
        ]
    if suite == "bptt":
        batch = 128 if paper else 8
        root = round(length**0.5)
        return [
            Case(
                suite=suite,
                label="BPTT step, recomputed" if recompute else "BPTT step",
                batch=batch,
                tokens=batch * length,
                config=replace(
                    base,
                    bptt=BPTTConfig(
                        steps=10**6,
                        batch_size=batch,
                        sequence_length=length,
                        recompute=recompute,
                    ),
                ),
            )
            for recompute in (0, root)
        ]
    return [
        Case(suite=suite, label="generate", batch=batch, tokens=batch, config=base)
        for batch in ((1, 128, 2048) if paper else (1, 32))
    ]


# --------------------------------------------------------------------------------------- measure


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How one path did on one case."""

    seconds: float
    """Median of a step; of a token of every sequence when generating."""
    start_up: float
    """Until the first steps were done: compilation, capture, choice of kernels."""
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case on both paths."""

    suite: str
    label: str
    batch: int
    tokens_per_second: float
    flops: int | None
    """Floating-point operations of a step, counted on the reference."""
    fast: Timing
    reference: Timing | None

    @property
    def ratio(self) -> float | None:
        return self.reference.seconds / self.fast.seconds if self.reference else None


FAST_STEPS = 4
"""Steps before anything is timed: three as usual, one that captures."""


def measure(case: Case, engine: EngineConfig, seconds: float, reference: bool = True) -> Result:
    """Time a case for about `seconds` on each path."""
    plain = None
    plain_engine = replace(engine, compile=False, fast=False)
    if reference and differs(engine):
        plain = _time(case, plain_engine, seconds)
    fast = _time(case, engine, seconds)
    return Result(
        suite=case.suite,
        label=case.label,
        batch=case.batch,
        tokens_per_second=case.tokens / fast.seconds,
        flops=_flops(case, plain_engine),
        fast=fast,
        reference=plain,
    )


def differs(engine: EngineConfig) -> bool:
    """Whether the fast path is another one: on a CPU, only if it is compiled."""
    return engine.compile or pick_device(engine.device).type == "cuda"


def _time(case: Case, engine: EngineConfig, seconds: float) -> Timing:
    _clear()
    began = time.perf_counter()
    run = _build(case, engine)
    step, repeats = _step(case, run)
    for _ in range(FAST_STEPS):
        step()
    _wait(run.engine)
    start_up = time.perf_counter() - began
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < seconds and len(taken) < 500):
        began = time.perf_counter()
        step()
        _wait(run.engine)
        taken.append(time.perf_counter() - began)
    peak = None
    if run.engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.engine.device)
    return Timing(seconds=median(taken) / repeats, start_up=start_up, peak_bytes=peak)


def _build(case: Case, engine: EngineConfig) -> Run:
    return Run(replace(case.config, engine=engine), Path("bench"), task=Noise())


def _step(case: Case, run: Run) -> tuple[Callable[[], object], int]:
    """What is timed, and how many steps of the table's unit it takes."""
    if case.suite != "generate":
        trainer = Trainer(
            run.objective(case.suite),
            run.config.stages()[case.suite],
            run.task,
            run.engine,
            seed=0,
        )
        context = trainer.frozen_rest()
        context.__enter__()  # for as long as the run lives
        return trainer.train_step, 1
    length = 256 if run.engine.device.type == "cuda" else 16
    prompt = torch.zeros(case.batch, 1, dtype=torch.long, device=run.engine.device)
    generator = torch.Generator(run.engine.device).manual_seed(0)
    rnn = run.rnn.eval()

    def generate() -> Tensor:
        with run.engine.autocast():
            return write(rnn, prompt, length, generator)

    return generate, length


def _flops(case: Case, engine: EngineConfig) -> int | None:
    """Counted by torch as the reference runs; a step of generation is a cell and a readout."""
    _clear()
    run = _build(case, engine)
    # The counter does not know the CPU's fused attention.
    plain = sdpa_kernel(SDPBackend.MATH) if run.engine.synchronous else nullcontext()
    with FlopCounterMode(display=False) as counter, plain, run.engine.autocast():
        if case.suite == "generate":
            with torch.no_grad():
                memory = run.rnn.empty_memory(case.batch)
                token = torch.zeros(case.batch, dtype=torch.long, device=run.engine.device)
                run.rnn.step(memory, token)
        else:
            objective = run.objective(case.suite)
            stage = run.config.stages()[case.suite]
            trainer = Trainer(objective, stage, run.task, run.engine, seed=0)
            with trainer.frozen_rest():
                batch = trainer.task.sample(stage.batch_size, trainer.generator)
                objective(batch, trainer.generator).total.backward()
    return counter.get_total_flops()


def matrix_peak(device: torch.device, seconds: float = 1.0) -> float:
    """The rate of a large matrix product on random numbers, in FLOP/s: what can be reached."""
    size, kind = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    engine = Engine(EngineConfig(device=str(device)))
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < seconds and len(taken) < 100):
        began = time.perf_counter()
        torch.mm(left, right)
        _wait(engine)
        taken.append(time.perf_counter() - began)
    return 2 * size**3 / median(taken)


def _wait(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---------------------------------------------------------------------------------------- report


def machine(device: torch.device) -> str:
    """The device in words, and what runs on it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def print_results(results: Sequence[Result], peak: float, device: torch.device) -> None:
    """One line a case; what this machine cannot tell has no column."""
    rows = [_row(result, peak) for result in results]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    console = Console(highlight=False)
    console.print(f"{machine(device)}; a matrix product reaches {peak / 1e12:.3g} TFLOP/s")
    table = Table()
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for result, row in zip(results, rows, strict=True):
        table.add_row(result.label, *(row[name] for name in columns))
    console.print(table)


def _row(result: Result, peak: float) -> dict[str, str]:
    rate = result.flops / result.fast.seconds if result.flops else None
    reference = result.reference
    return {
        "batch": str(result.batch),
        "plain": _duration(reference.seconds) if reference else "",
        "fast": _duration(result.fast.seconds),
        "ratio": f"{result.ratio:.1f}x" if result.ratio else "",
        "tokens/s": f"{result.tokens_per_second:,.0f}",
        "TFLOP/s": f"{rate / 1e12:.2g}" if rate else "",
        "peak": f"{rate / peak:.0%}" if rate else "",
        "GB, plain": _gigabytes(reference),
        "GB, fast": _gigabytes(result.fast),
        "start-up": _duration(result.fast.start_up),
    }


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _gigabytes(timing: Timing | None) -> str:
    return f"{timing.peak_bytes / 1e9:.1f}" if timing and timing.peak_bytes is not None else ""


def as_record(results: Sequence[Result], engine: EngineConfig, size: str, peak: float) -> dict:
    """Everything measured, for JSON."""
    return {
        "machine": machine(pick_device(engine.device)),
        "size": size,
        "matrix_peak_flops": peak,
        "compiled": engine.compile,
        "results": [asdict(result) | {"ratio": result.ratio} for result in results],
    }
