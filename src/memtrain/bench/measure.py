"""Time benchmark cases: seconds, bytes and floating-point operations."""

import gc
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memtrain.accel.engine import Engine, pick_device
from memtrain.bench.cases import Case, Noise, models
from memtrain.config import EngineConfig
from memtrain.generation.sampling import sample
from memtrain.models.build import build_models
from memtrain.training.run import Run
from memtrain.training.step import Trainer


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The timing of one path on one case."""

    seconds: float
    """Median per step; when generating, per token of every sequence."""
    start_up: float
    """Seconds until the first steps were done: compilation, capture, choice of kernels."""
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The timings of both paths on one case."""

    suite: str
    label: str
    batch: int
    tokens_per_second: float
    flops: int | None
    """Floating-point operations per step, counted on the reference."""
    fast: Timing
    reference: Timing | None
    """None if it is the same path, was not requested, or was out of memory."""

    @property
    def ratio(self) -> float | None:
        return self.reference.seconds / self.fast.seconds if self.reference else None


COUNTED = 4
"""Batch on which the operations of rollouts are counted; they are proportional to the batch."""
FAST_STEPS, PLAIN_STEPS = 4, 1
"""Warm-up steps: three and one that captures a graph; the reference needs one."""


def measure(case: Case, engine: EngineConfig, seconds: float, reference: bool = True) -> CaseResult:
    """Time a case for about `seconds` on each path."""
    plain = None
    plain_engine = replace(engine, compile=False, fast=False)
    if reference and differs(engine):
        with suppress(torch.OutOfMemoryError):  # it needs more memory than the fast path
            plain = time_case(case, plain_engine, seconds)
    fast = time_case(case, engine, seconds)
    return CaseResult(
        suite=case.suite,
        label=case.label,
        batch=case.batch,
        tokens_per_second=case.tokens / fast.seconds,
        flops=_flops(case, plain_engine),
        fast=fast,
        reference=plain,
    )


def differs(engine: EngineConfig) -> bool:
    """Whether the fast path differs from the reference."""
    known = pick_device(engine.device).type in ("cuda", "cpu")
    return engine.compile or (engine.fast and known)


def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
    """Time one path of a case for about `seconds`."""
    held = _clear()
    began = time.perf_counter()
    run = _build(case, engine)
    with ExitStack() as frozen:
        step, repeats = _step(case, run, frozen)
        for _ in range(FAST_STEPS if engine.fast or engine.compile else PLAIN_STEPS):
            step()
        _wait(run.engine.device)
        start_up = time.perf_counter() - began
        taken: list[float] = []
        while _continues(taken, seconds):
            began = time.perf_counter()
            step()
            _wait(run.engine.device)
            taken.append(time.perf_counter() - began)
    peak = None
    if run.engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.engine.device) - held
    return Timing(seconds=median(taken) / repeats, start_up=start_up, peak_bytes=peak)


def _continues(taken: list[float], seconds: float) -> bool:
    """Time for `seconds`, and at least three steps unless they are very slow."""
    if len(taken) < 3:
        return sum(taken) < 3 * seconds
    return sum(taken) < seconds and len(taken) < 500


def _build(case: Case, engine: EngineConfig) -> Run:
    return Run(replace(case.config, engine=engine), Path("bench"), task=Noise())


def _trainer(case: Case, run: Run) -> Trainer:
    stage = run.config.stages()[case.suite]
    return Trainer(run.objective(case.suite), stage, run.task, run.engine, seed=0)


def _step(case: Case, run: Run, frozen: ExitStack) -> tuple[Callable[[], object], int]:
    """The function to time, and how many steps it does; untrained parameters are frozen."""
    if case.suite != "generate":
        trainer = _trainer(case, run)
        frozen.enter_context(trainer.frozen_rest())
        return trainer.train_step, 1
    length = 256 if run.engine.device.type == "cuda" else 16
    prompt = torch.zeros(case.batch, 1, dtype=torch.long, device=run.engine.device)
    generator = torch.Generator(run.engine.device).manual_seed(0)
    rnn = run.rnn.eval()

    def generate() -> Tensor:
        with run.engine.autocast():
            return sample(rnn, prompt, length, generator)

    return generate, length


def _flops(case: Case, engine: EngineConfig) -> int | None:
    """Operations of the reference; a step of generation is a cell step and a readout."""
    _clear()
    config, counted = case.config, case.batch
    if case.suite in ("dmt", "bptt"):
        counted = min(COUNTED, case.batch)
        stage = replace(config.stages()[case.suite], batch_size=counted)
        config = replace(config, **{case.suite: stage})
    run = _build(replace(case, config=config), engine)
    # torch's counter does not count the CPU's fused attention.
    plain = sdpa_kernel(SDPBackend.MATH) if run.engine.device.type == "cpu" else nullcontext()
    with FlopCounterMode(display=False) as counter, plain, run.engine.autocast():
        if case.suite == "generate":
            with torch.no_grad():
                memory = run.rnn.empty_memory(case.batch)
                token = torch.zeros(case.batch, dtype=torch.long, device=run.engine.device)
                run.rnn.step(memory, token)
        else:
            trainer = _trainer(case, run)
            with trainer.frozen_rest():
                batch = trainer.task.sample(counted, trainer.generator)
                trainer.objective(batch, trainer.generator).total.backward()
    return counter.get_total_flops() * case.batch // counted


def explain_models(size: str, engine: EngineConfig) -> list[str]:
    """Which fast path serves each part of models of a size here, and why a better one does not."""
    from memtrain.accel.fast_paths import explain

    rnn, teacher = build_models(models(size), Noise().vocab_size)
    parts = {"rnn": rnn} | ({"teacher": teacher} if teacher is not None else {})
    return explain(nn.ModuleDict(parts), Engine(engine))


def matrix_peak(device: torch.device, seconds: float = 1.0) -> float:
    """The rate of a large matrix product on random numbers, in FLOP/s."""
    size, kind = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < seconds and len(taken) < 100):
        began = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        taken.append(time.perf_counter() - began)
    return 2 * size**3 / median(taken)


def machine(device: torch.device) -> str:
    """The device and torch's version, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"{platform.machine()}, {threads} thread{plural}, torch {torch.__version__}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clear() -> int:
    """Free the memory of earlier cases; returns the bytes still allocated."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    # cuBLAS keeps a workspace per stream, and every case has its own streams.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
