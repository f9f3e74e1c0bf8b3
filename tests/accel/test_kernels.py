"""The kernel tests in Triton's interpreter, in a process of their own (see kernel_testing.py)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NAMES = ("block", "mlp", "norm", "qkv", "rollout_stack", "rollout_step")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter():
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
