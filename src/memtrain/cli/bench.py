"""memtrain bench."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError
from memtrain.files import write_output

FIGURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class _BenchOptions:
    """Time training steps (SMT, DMT, BPTT) and generation on this machine: the fast path, and the
    plain PyTorch reference."""

    suite: tyro.conf.Positional[
        Literal["smt", "dmt", "generate", "bptt", "all", "growth", "data"]
    ] = "all"
    """smt, dmt, generate, bptt, all, or growth: step time against length, memory tokens, width and
    batch size, which takes minutes. Ctrl-C stops growth after the running step, a second one at
    once; the points measured so far are plotted. Or data: SMT and BPTT steps from a large token
    file on disk, dropped from the page cache before, and from a small one, in turns; with the peak
    memory of both processes. RssAnon is what a process allocated itself, VmHWM all its resident
    pages, with mapped libraries and files; neither counts the page cache."""
    size: Literal["auto", "paper", "medium", "tiny"] = "auto"
    """Size of the models; auto: the paper's on a GPU, else tiny. growth has no medium."""
    seconds: float | None = None
    """Seconds per case and path, and at least three steps (default: 3; for growth 0.5)."""
    device: str = "auto"
    """auto: a CUDA GPU if there is one; or cpu, cuda, cuda:1, ..., mps."""
    compile: bool = True
    """On a GPU, torch.compile the parts that our kernels do not cover."""
    reference: bool = True
    """Also time plain PyTorch, the reference that the fast path is tested against."""
    figure: Path = Path("growth.png")
    """Plot of growth (PNG, PDF or SVG); its numbers are saved next to it as JSON."""
    minutes: float = math.inf
    """Start no more steps of growth after this many minutes, and plot."""
    redraw: Path | None = None
    """Plot and print an earlier growth from its JSON file; time nothing."""
    gigabytes: float = 3.0
    """Size of data's large token file, in 10^9 bytes; its store takes as much again."""
    folder: Path | None = None
    """Folder for data's files (default: the system's temporary folder). They are removed."""
    explain: bool = False
    """Print which fast path serves each part of the models, and why a better one does not; time
    nothing."""
    json: bool = False
    """Print one JSON object as the last line of stdout, and nothing else there."""


def bench(arguments: list[str]) -> int:
    """Time training steps and generation on this machine."""
    options = parse(_BenchOptions, arguments, "memtrain bench")
    for name in ("seconds", "minutes", "gigabytes"):
        given = getattr(options, name)
        if given is not None and not given > 0:
            raise MemtrainError(f"{name}={given}: must be above 0")
    if options.explain:
        from memtrain.bench.measure import explain_models

        _, size, engine = _machine(options)
        lines = explain_models(size, engine)
        print(json.dumps({"size": size, "fast_paths": lines}) if options.json else "\n".join(lines))
        return 0
    for name, default, suite in (
        ("minutes", math.inf, "growth"),
        ("redraw", None, "growth"),
        ("figure", _BenchOptions.figure, "growth"),
        ("gigabytes", 3.0, "data"),
        ("folder", None, "data"),
    ):
        if options.suite != suite and getattr(options, name) != default:
            raise MemtrainError(f"{name}: only for {suite}; memtrain bench {suite} --{name} ...")
    if options.suite == "growth":
        if options.size == "medium":
            raise MemtrainError("size=medium: growth has paper and tiny")
        return _growth(options)
    if options.suite == "data":
        return _data(options)

    import torch

    from memtrain.bench.cases import SUITES, cases
    from memtrain.bench.measure import matrix_peak, measure
    from memtrain.bench.report import as_record, format_duration, print_results

    device, size, engine = _machine(options)
    seconds = 3.0 if options.seconds is None else options.seconds
    suites = SUITES if options.suite == "all" else [options.suite]
    todo = [case for suite in suites for case in cases(suite, size)]
    results = []
    for index, case in enumerate(todo):
        _say(f"{index + 1}/{len(todo)}  {case.label}, batch {case.batch}")
        try:
            results.append(measure(case, engine, seconds, options.reference))
            _say(f"  {format_duration(results[-1].fast.seconds)}")
        except torch.OutOfMemoryError:
            _say("  left out: not enough memory; --size tiny has smaller models")
    peak = matrix_peak(device)
    if options.json:
        print(json.dumps(as_record(results, engine, size, peak)))
    else:
        print_results(results, peak, device)
    return 0


def _growth(options: Any) -> int:
    """Time or read growth curves, print and plot them."""
    if options.figure.suffix not in FIGURES:
        raise MemtrainError(f"figure={options.figure}: must end in {', '.join(FIGURES)}")

    from memtrain.bench.growth import as_curves, points, read_curves, time_points, to_json
    from memtrain.bench.report import draw_curves, print_curves
    from memtrain.runs.processes import Terminated

    options.figure.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(options.figure.parent, os.W_OK):  # before minutes of timing
        raise MemtrainError(f"figure={options.figure}: {options.figure.parent} cannot be written")
    status = 0
    if options.redraw:
        curves = read_curves(options.redraw)
    else:
        _, size, engine = _machine(options)
        seconds = 0.5 if options.seconds is None else options.seconds
        _say("Ctrl-C stops after the running step, a second one at once; timed points are plotted")
        timed = time_points(points(size), engine, seconds, _say, options.minutes)
        status = 128 + timed.signal_number if timed.signal_number else int(timed.failed)
        if not timed.points and timed.signal_number:
            raise Terminated(timed.signal_number)
        if not timed.points:
            raise MemtrainError(f"nothing was timed: {timed.left_out[0][1]}")
        curves = as_curves(timed, engine, size)
        write_output(options.figure.with_suffix(".json"), (to_json(curves) + "\n").encode())
    if options.json:
        print(to_json(curves))
    else:
        print_curves(curves)
    draw_curves(curves, options.figure)
    _say(f"figure  {options.figure}")
    return status


def _data(options: Any) -> int:
    """Train from a large and a small token file, and print speed and memory."""
    from memtrain.bench.large_data import data_record, measure_data, print_data

    device, size, engine = _machine(options)
    seconds = 3.0 if options.seconds is None else options.seconds
    cases = measure_data(options.gigabytes, size, engine, seconds, options.folder, _say)
    if options.json:
        print(json.dumps(data_record(cases, size, device)))
    else:
        print_data(cases, device)
    return 0


def _machine(options: Any) -> tuple[Any, str, Any]:
    """Device, model size and engine of the options."""
    from memtrain.accel.engine import pick_device
    from memtrain.config import EngineConfig

    device = pick_device(options.device)
    size = options.size if options.size != "auto" else "paper" if device.type == "cuda" else "tiny"
    compiled = options.compile and device.type == "cuda"
    return device, size, EngineConfig(device=options.device, compile=compiled)


def _say(line: str) -> None:
    """Print progress to stderr; stdout is for results."""
    print(line, file=sys.stderr)
