"""Shared by the kernel tests: where they run, how they compare, and how they compile.

With a GPU they run on it (marker `gpu`). With TRITON_INTERPRET=1 Triton's interpreter runs them on
the CPU, in fp32 because it has no bf16; `test_kernels.py` does that in a separate process,
because the variable must be set before Triton is imported. Inputs are random and new in each run; a
failing test prints its seed, and KERNEL_SEED repeats it.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from conftest import import_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KIND = torch.float32 if INTERPRETED else torch.bfloat16
MARKS = [pytest.mark.gpu]
if INTERPRETED:  # NumPy's, of NaN and infinities
    MARKS = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED and not torch.cuda.is_available():
    reason = "no CUDA device; test_kernels.py runs these in Triton's interpreter"
    pytest.skip(reason, allow_module_level=True)


import_kernels()
from memtrain.accel.triton.common import precompile  # noqa: E402
from memtrain.accel.triton.rollout_linear import LIMITS  # noqa: E402

if INTERPRETED:
    LIMITS.precision = torch.float32


def on_gpu(*cases):
    """Cases that are too large for the interpreter."""
    return [] if INTERPRETED else list(cases)


def shape_id(letters: str, *sizes: object) -> str:
    """For example N3-L17-W64."""
    return "-".join(f"{letter}{size}" for letter, size in zip(letters, sizes, strict=True))


def relative_error(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm())


def assert_near(limit: float, parts: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Every (value, reference) differs by a relative error of at most `limit`; NaN never does."""
    errors = {name: relative_error(*pair) for name, pair in parts.items()}
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    assert not wrong, f"relative errors over {limit:.0e}: {wrong}"


@pytest.fixture(autouse=True)
def seeded_and_poisoned(monkeypatch):
    """New random inputs for each test, and NaN in all memory that a kernel has to fill."""
    seed = int(os.environ.get("KERNEL_SEED", torch.seed() % 2**31))
    print(f"KERNEL_SEED={seed}")
    torch.manual_seed(seed)

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args, **options):
            out = allocate(*args, **options)
            with torch.no_grad():
                return out.fill_(torch.nan) if out.is_floating_point() else out

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def limits(monkeypatch) -> Callable[..., None]:
    """Move the row counts at which a rollout changes kernels, to reach them with few rows."""

    def move(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setattr(LIMITS, name, value)

    return move


def compile_ahead(request: pytest.FixtureRequest, test: Callable, run: Callable) -> None:
    """Compile the kernels of a test's selected cases in parallel: most of the time goes there."""
    if INTERPRETED:
        return
    cases = [item for item in request.session.items if getattr(item, "obj", None) is test]
    with precompile(wait=True):
        for case in cases:
            run(**case.callspec.params)  # type: ignore[attr-defined]
