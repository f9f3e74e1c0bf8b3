"""memtrain env."""

import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memtrain import __version__
from memtrain.cli.args import parse
from memtrain.errors import MemtrainError

PACKAGES = ("torch", "triton", "numpy", "safetensors")


@dataclass(frozen=True)
class _EnvOptions:
    """Print the versions and the hardware here, for an issue report, and which fast paths serve
    models of the paper's size."""

    device: str = "auto"
    """auto: a CUDA GPU if there is one; or cpu, cuda, cuda:1, ..., mps."""
    json: bool = False
    """Print one JSON object instead."""


def env(arguments: list[str]) -> int:
    """Print the versions and hardware that an issue report needs."""
    options = parse(_EnvOptions, arguments, "memtrain env")
    found = facts(options.device)
    if options.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines or ["none"]):
            shown = "not installed" if line is None else line
            print(f"{'' if index else name.replace('_', ' '):<14}{shown}")
    return 0


def facts(device: str = "auto") -> dict[str, Any]:
    """Versions, hardware and the fast paths at the paper's size on a device."""
    import torch

    from memtrain.bench.measure import explain_models
    from memtrain.config import EngineConfig

    cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    try:
        paths = explain_models("paper", EngineConfig(device=device))
    except MemtrainError as error:  # a report is needed above all where something is missing
        paths = [str(error)]
    return {
        "memtrain": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "cuda": torch.version.cuda or "none in this torch",
        "driver": _driver() if cuda else "none",
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB" for gpu in gpus],
        "fast_paths": paths,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _cpu() -> str:
    with suppress(OSError):
        if found := re.search(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text()):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter(done.stdout.split()), "unknown")
