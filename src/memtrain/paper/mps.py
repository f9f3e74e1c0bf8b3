"""Kernels of several processes at the same time on one NVIDIA GPU (its Multi-Process Service).

Without the service the processes take turns, and small kernels leave most of a large GPU idle in
each of them. Where it cannot be started everything works as before.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30.0
"""To start it, to try it, to end it, each."""
PROBE = """
import ctypes, sys
cuda, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
sys.exit(
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or cuda.cuCtxSetCurrent(context)
    or cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1024))
)
"""
"""A process that uses the GPU as a run would; exit status 0 if it could."""


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Processes that are started inside share the GPU through a service of their own.

    Yields whether they do. One that the user has started is left alone.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or PIPES in os.environ:
        yield PIPES in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as place:
        own = {PIPES: place, LOGS: str(Path(place) / "logs")}
        served = _call([control, "-d"], own) and _call([sys.executable, "-c", PROBE], own)
        try:
            if served:
                os.environ.update(own)
            yield served
        finally:
            for name in own:
                os.environ.pop(name, None)
            _call([control], own, "quit -t 5\n")


def _call(command: list[str], environment: dict[str, str], said: str = "") -> bool:
    """Whether a command ended well, in time."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            input=said,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
