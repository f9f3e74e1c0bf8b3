"""The MLP's kernels against fp64."""

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import (
    DEVICE,
    INTERPRETED,
    KIND,
    MARKS,
    assert_near,
    compile_ahead,
    on_gpu,
    seeded_and_poisoned,  # noqa: F401
    shape_id,
)
from torch import Tensor

from memtrain.accel.triton.mlp import run_mlp_down_backward, run_mlp_up
from memtrain.accel.triton.norm import column_sums

pytestmark = MARKS
SHAPES = [(5, 16, 64), (70, 48, 208), (130, 64, 256), (300, 48, 80)]
SHAPES += on_gpu(*((rows, 256, 1024) for rows in (17, 2176, 10112, 20001, 40001, 69632)))
SHAPES += on_gpu((999, 384, 1536))


def new_inputs(rows: int, width: int, hidden: int) -> list[Tensor]:
    """x, up, bias, down, gradient; x is large enough to reach GELU's tails."""
    shapes = (rows, width), (hidden, width), (hidden,), (width, hidden), (rows, width)
    x, up, bias, down, gradient = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    scaled = 4 * x, up / width**0.5, bias, down / width**0.5, gradient
    return [part.to(KIND) for part in scaled]


def run_mlp(x, up, bias, down, gradient):
    before, after = run_mlp_up(x, up, bias, keep=True)
    _, only = run_mlp_up(x, up, bias, keep=False)
    return before, after, only, *run_mlp_down_backward(gradient, down, before)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    compile_ahead(request, test_mlp, lambda **shape: run_mlp(*new_inputs(**shape)))


@pytest.mark.parametrize(
    "rows, width, hidden", [pytest.param(*shape, id=shape_id("RWO", *shape)) for shape in SHAPES]
)
def test_mlp(rows, width, hidden):
    inputs = new_inputs(rows, width, hidden)
    before, after, only, of_before, shares = run_mlp(*inputs)
    x, up, bias, down, gradient = (part.double() for part in inputs)
    wide = (x @ up.T + bias).requires_grad_()
    expected = F.gelu(wide)
    expected.backward(gradient @ down)
    assert wide.grad is not None
    sums = torch.cat([wide.grad.sum(0), gradient.sum(0)])
    parts = {
        "before": (before, wide),
        "after": (after, expected),
        "after, alone": (only, expected),
        "gradient": (of_before, wide.grad),
        "sums": (column_sums(shares), sums),
    }
    assert_near(1e-5 if INTERPRETED else 1.5e-2, parts)
