"""memtrain bench."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memtrain.cli.parse import parse
from memtrain.errors import MemtrainError


def bench(arguments: list[str]) -> int:
    """Time the training steps and generation on this machine."""
    import tyro

    @dataclass(frozen=True)
    class Bench:
        """Time SMT, DMT and BPTT steps and generation here: the fast path, and the same
        mathematics in plain PyTorch beside it."""

        suite: tyro.conf.Positional[Literal["smt", "dmt", "generate", "bptt", "all", "growth"]] = (
            "all"
        )
        """What to time; growth times all steps against length, memory tokens, width and batch."""
        size: Literal["auto", "paper", "tiny"] = "auto"
        """Models of the paper's size, or tiny ones; auto: the paper's on a GPU."""
        seconds: float = 3.0
        """How long each case is timed, on each path; at least three steps are."""
        device: str = "auto"
        """auto takes a GPU if there is one; else cpu, cuda, cuda:1, ..."""
        compile: bool = True
        """torch.compile what our kernels do not serve, on a GPU."""
        reference: bool = True
        """Time plain PyTorch too, the reference that the fast path is tested against."""
        figure: Path = Path("growth.png")
        """Where growth draws its curves."""
        json: bool = False
        """Print one JSON object as the last line, nothing else on stdout."""

    options = parse(Bench, arguments, "memtrain bench")
    if not options.seconds > 0:
        raise MemtrainError(f"seconds={options.seconds}: must be above 0")

    import torch

    from memtrain.bench.cases import SUITES, cases, growth
    from memtrain.bench.measure import matrix_peak, measure, time_growth
    from memtrain.bench.report import as_record, draw_growth, growth_record, print_results
    from memtrain.config import EngineConfig
    from memtrain.train.engine import pick_device

    device = pick_device(options.device)
    size = options.size if options.size != "auto" else "paper" if device.type == "cuda" else "tiny"
    compiled = options.compile and device.type == "cuda"
    engine = EngineConfig(device=options.device, compile=compiled)
    if options.suite == "growth":
        points = time_growth(growth(size), engine, options.seconds, _say)
        record = growth_record(points, engine, size)
        draw_growth(record, options.figure)
        print(json.dumps(record) if options.json else options.figure)
        return 0
    suites = SUITES if options.suite == "all" else [options.suite]
    todo = [case for suite in suites for case in cases(suite, size)]
    results = []
    for index, case in enumerate(todo):
        _say(f"{index + 1}/{len(todo)}  {case.label}, batch {case.batch}")
        try:
            results.append(measure(case, engine, options.seconds, options.reference))
        except torch.OutOfMemoryError:
            _say("  left out: not enough memory; --size tiny has smaller models")
    peak = matrix_peak(device)
    if options.json:
        print(json.dumps(as_record(results, engine, size, peak)))
    else:
        print_results(results, peak, device)
    return 0


def _say(line: str) -> None:
    """How far it is; stdout is for results."""
    print(line, file=sys.stderr)
