"""Training from a token file larger than memory, next to the same training from a small one.

A file of random tokens is written and prepared in a temporary folder. Two processes then train the
same models, one from the small store, one from the large one on disk, and take turns, so that other
work on the machine slows both. The large store is dropped from the page cache first: its windows
are really read from the disk.
"""

import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from memtrain.bench.cases import bptt_case, models, smt_case
from memtrain.bench.measure import machine
from memtrain.bench.report import empty_table
from memtrain.config import EngineConfig, Stream
from memtrain.data.prepare import prepare_tokens
from memtrain.data.store import SPLITS
from memtrain.errors import MemtrainError
from memtrain.training.run import Run
from memtrain.training.step import Trainer

VOCABULARY = 1024
SMALL = 2**24
"""Bytes of the small token file."""
BLOCK = 2**22
"""Tokens written at a time."""
WARM_UP = 5
"""Steps before the first that is timed: a CUDA graph is captured in the fourth."""
TURN_SECONDS = 0.5
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The peak memory of a process, in bytes; None where the system does not tell."""

    rss_anon: int | None
    """RssAnon: what the process allocated itself, without cached files; read every 10 ms."""
    vm_hwm: int | None
    """VmHWM: the peak of all resident pages, with the libraries and files that are mapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCase:
    """One store: its preparation and its training."""

    name: str
    file_bytes: int
    prepare_seconds: float
    prepare_memory: Memory
    placement: str
    """Where its tokens are during training."""
    steps_per_second: dict[str, float]
    """By kind of step; the median over turns of half a second."""
    train_memory: Memory


# ----------------------------------------------------------------------------------- processes


def peak(name: str) -> int | None:
    """A size in /proc/self/status, in bytes."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None


class PeakMemory:
    """Watches the memory of this process from a thread of its own."""

    def __init__(self) -> None:
        self._highest = peak("RssAnon")
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._look()

    def _look(self) -> None:
        if (now := peak("RssAnon")) is not None:
            self._highest = max(now, self._highest or 0)

    def end(self) -> Memory:
        """The peaks so far."""
        self._ended.set()
        self._look()
        return Memory(rss_anon=self._highest, vm_hwm=peak("VmHWM"))


def _prepare(pipe: Connection, source: Path, out: Path) -> None:
    """Prepare a token file in a process of its own."""
    watched, began = PeakMemory(), time.perf_counter()
    prepare_tokens(source, out, vocab_size=VOCABULARY)
    pipe.send((time.perf_counter() - began, watched.end()))


def _train(pipe: Connection, store: Path, size: str, engine: EngineConfig, resident: Any) -> None:
    """Train from a store on request: receives the name of a stage, sends steps per second."""
    watched = PeakMemory()
    base = models(size)
    # Two processes train at the same time: both have to fit on one GPU.
    length, batch = (32, 8) if size == "tiny" else (256, 32)
    bptt = bptt_case(base, "", batch, length).config.bptt
    config = replace(smt_case(base, "").config, bptt=bptt, engine=engine)
    data = Stream(path=str(store), evaluate_length=length, resident=resident)
    run = Run(replace(config, data=data))
    trainers: dict[str, Trainer] = {}
    pipe.send(run.task.placement)
    for name in iter(pipe.recv, None):
        if name not in trainers:
            stage = run.config.stages()[name]
            trainers[name] = Trainer(run.objective(name), stage, run.task, run.engine, seed=0)
        with trainers[name].frozen_rest():
            pipe.send(_turn(trainers[name]))
    pipe.send(watched.end())


def _turn(trainer: Trainer) -> float:
    for _ in range(max(0, WARM_UP - trainer.step)):
        trainer.train_step()
    trainer.check()  # waits for the device
    began, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < TURN_SECONDS or steps < 3:
        trainer.train_step()
        steps += 1
        if steps % 8 == 0 or passed > TURN_SECONDS / 2:
            trainer.check()  # else a GPU's queue would count, and not its work
    trainer.check()
    return steps / (time.perf_counter() - began)


class _Worker:
    """A process of its own, whose peak memory is that of its work alone."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        spawn = mp.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, work, *arguments)
        self.process = spawn.Process(target=_report_errors, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: str | None) -> Any:
        """Send a question and wait for the answer."""
        self.pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        """The next answer; an error of the process is raised here."""
        try:
            found = self.pipe.recv()
        except EOFError:
            raise MemtrainError("a process of the benchmark was killed: out of memory?") from None
        if isinstance(found, MemtrainError):
            raise found
        return found

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _report_errors(pipe: Connection, work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(pipe, *arguments)
    except MemtrainError as error:
        pipe.send(error)


# -------------------------------------------------------------------------------------- measure


def measure_data(
    gigabytes: float,
    size: str,
    engine: EngineConfig,
    seconds: float,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[DataCase]:
    """Train from a small and from a large token file.

    Args:
        gigabytes: the size of the large file, in 10^9 bytes.
        size: of the models.
        engine: of both processes.
        seconds: of each store and kind of step.
        folder: where the files are made; by default the system's temporary folder.
        say: receives lines on the progress.
    """
    place = Path(tempfile.gettempdir()) if folder is None else folder
    sizes = {"small": SMALL, "large": int(gigabytes * 1e9)}
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise MemtrainError(f"folder={place}: {error.strerror}") from None
    if (needed := 2 * sum(sizes.values())) > free:
        raise MemtrainError(
            f"gigabytes={gigabytes:g}: the file and its store need {needed / 1e9:.1f} GB, {place} "
            f"has {free / 1e9:.1f} GB free; take fewer, or another --folder"
        )
    with tempfile.TemporaryDirectory(prefix="memtrain-bench-", dir=place) as temporary:
        prepared = {}
        for name, nbytes in sizes.items():
            source, store = Path(temporary) / f"{name}.npy", Path(temporary) / name
            say(f"{name}: writing {nbytes / 1e9:.3g} GB of tokens")
            write_tokens(source, nbytes // 2)
            with _Worker(_prepare, source, store) as worker:
                prepared[name] = worker.answer()
            say(f"{name}: prepared in {prepared[name][0]:.1f} s")
            source.unlink()
            drop_cache(store)
        stores = {name: Path(temporary) / name for name in sizes}
        with (
            _Worker(_train, stores["small"], size, engine, "auto") as small,
            _Worker(_train, stores["large"], size, engine, "disk") as large,
        ):
            workers = {"small": small, "large": large}
            placements = {name: worker.answer() for name, worker in workers.items()}
            rates = {name: {} for name in sizes}
            for stage in ("smt", "bptt"):
                turns: dict[str, list[float]] = {name: [] for name in sizes}
                for number in range(max(3, round(seconds / TURN_SECONDS))):
                    for name in sorted(sizes, reverse=number % 2 == 0):
                        turns[name].append(workers[name].ask(stage))
                for name in sizes:
                    rates[name][stage] = median(turns[name])
                    say(f"{name}: {stage} {rates[name][stage]:.3g} steps/s")
            memory = {name: worker.ask(None) for name, worker in workers.items()}
    return [
        DataCase(
            name=name,
            file_bytes=nbytes,
            prepare_seconds=prepared[name][0],
            prepare_memory=prepared[name][1],
            placement=placements[name],
            steps_per_second=rates[name],
            train_memory=memory[name],
        )
        for name, nbytes in sizes.items()
    ]


def write_tokens(path: Path, count: int) -> None:
    """Write random tokens as a .npy, a block at a time."""
    random = np.random.default_rng(0)
    header = {"descr": "<u2", "fortran_order": False, "shape": (count,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, count, BLOCK):
            block = random.integers(0, VOCABULARY, min(BLOCK, count - first), np.uint16)
            file.write(block.astype("<u2").data)


def drop_cache(store: Path) -> None:
    """Drop a store's tokens from the page cache, on Linux."""
    if sys.platform != "linux":
        return
    for split in SPLITS:
        with (store / f"{split}.bin").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --------------------------------------------------------------------------------------- report


MEMORY = ("RssAnon", "VmHWM")


def print_data(cases: list[DataCase], device: torch.device) -> None:
    """Print a line per store, and where its tokens were."""
    console = Console(highlight=False)
    console.print(machine(device))
    stages = list(cases[0].steps_per_second)
    training = empty_table("training", ["GB", *(f"{s}, steps/s" for s in stages), *MEMORY])
    preparing = empty_table("preparing", ["GB", "seconds", *MEMORY])
    for case in cases:
        size = f"{case.file_bytes / 1e9:.3g}"
        rates = [f"{rate:.3g}" for rate in case.steps_per_second.values()]
        training.add_row(case.name, size, *rates, *_megabytes(case.train_memory))
        seconds = f"{case.prepare_seconds:.1f}"
        preparing.add_row(case.name, size, seconds, *_megabytes(case.prepare_memory))
    console.print(training)
    console.print(preparing)
    small, large = cases
    for stage in stages:
        ratio = large.steps_per_second[stage] / small.steps_per_second[stage]
        console.print(f"{stage}: the large store at {ratio:.0%} of the small one's speed")
    for case in cases:
        console.print(f"{case.name}: {case.placement}", soft_wrap=True)


def data_record(cases: list[DataCase], size: str, device: torch.device) -> dict[str, Any]:
    """All measurements, for JSON."""
    return {"machine": machine(device), "size": size, "cases": [asdict(case) for case in cases]}


def _megabytes(memory: Memory) -> list[str]:
    return ["" if one is None else f"{one / 1e6:,.0f} MB" for one in asdict(memory).values()]
