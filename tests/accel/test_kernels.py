"""The kernels' checks, each in a process of its own (see kernel_checks.py)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("kernel_checks.py")


def run_checks(device: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECKS), device],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "ok " in done.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_kernels_equal_their_references_in_the_interpreter():
    run_checks("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_their_references_on_the_device():
    run_checks("cuda")
