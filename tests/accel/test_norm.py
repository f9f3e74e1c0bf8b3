"""The kernels that sum over rows or columns, against fp64: norm, column sums, table gradient."""

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import (
    DEVICE,
    INTERPRETED,
    KIND,
    MARKS,
    assert_near,
    on_gpu,
    seeded_and_poisoned,  # noqa: F401
    shape_id,
)

import memtrain.accel.triton.norm as kernels
from memtrain.models.layers import table_gradient

pytestmark = MARKS


def norm_cases():
    """Shape, whether an update is added, whether the sum has a gradient of its own, whether the
    norm is in fp32, and changes of the backward pass's tile."""
    shapes = [(1, 48), (37, 48), (70, 256), (5, 384)]
    shapes += on_gpu(*((rows, 256) for rows in (17, 2176, 10112, 20001, 69632)), (999, 384))
    for shape in shapes:
        yield pytest.param(*shape, True, True, False, {}, id=shape_id("RW", *shape))
    for add, through, wide in (
        (True, False, False),
        (False, False, False),
        (False, True, False),
        (True, False, True),
    ):
        name = f"R37-W48{'-add' * add}{'-through' * through}{'-wide' * wide}"
        yield pytest.param(37, 48, add, through, wide, {}, id=name)
    # Programs with several iterations, the last of them beyond the end; loads made ahead of them.
    for stages in (1, 2, 3):
        tile = {"BR": 4, "per_processor": 1, "num_warps": 4, "STAGES": stages}
        shape = (30, 48) if INTERPRETED else (3001, 256)
        yield pytest.param(*shape, True, True, False, tile, id=f"iterations-stages{stages}")


@pytest.mark.parametrize("rows, width, add, through, wide, tile", list(norm_cases()))
def test_norm(rows, width, add, through, wide, tile, monkeypatch):
    usual = kernels.norm_tiles
    monkeypatch.setattr(
        kernels, "norm_tiles", lambda *shape: usual(*shape) | (tile if shape[-1] else {})
    )
    make = lambda: torch.randn(rows, width, device=DEVICE)  # noqa: E731
    # A stream much larger or smaller than 1, as deep ones are.
    x = (make() * 10 ** torch.randn(rows, 1, device=DEVICE)).to(KIND)
    update = make().to(KIND) if add else None
    normed_kind = torch.float32 if wide else KIND
    of_normed, of_total = make().to(normed_kind), make().to(KIND) if through else None
    gain = torch.randn(width, device=DEVICE).to(KIND).float()
    total, normed = kernels.run_norm(x, update, gain, normed_kind)
    of_x, shares = kernels.run_norm_backward(total, gain, of_normed, of_total, KIND)
    assert normed.dtype == normed_kind and of_x.dtype == KIND

    exact = (x.double() + (0 if update is None else update.double())).requires_grad_()
    weight = gain.double().requires_grad_()
    expected = F.rms_norm(exact, (width,), weight, 1e-6)
    loss = (expected * of_normed.double()).sum()
    if of_total is not None:
        loss = loss + (exact * of_total.double()).sum()
    wanted, of_gain = torch.autograd.grad(loss, [exact, weight])
    # Gradients shrink as rows grow: without this, only small rows would count.
    size = wanted.norm(dim=1, keepdim=True)
    parts = {
        "sum": (total, exact),
        "norm": (normed, expected),
        "gradient": (of_x / size, wanted / size),
        "gradient of the gain": (kernels.column_sums(shares), of_gain),
    }
    assert_near(1e-5 if INTERPRETED else 1.5e-2, parts)


@pytest.mark.parametrize("rows, width", [(1, 16), (300, 40), (1088, 1280)])
def test_column_sums(rows, width):
    x = torch.randn(rows, width, device=DEVICE)
    assert_near(1e-5, {"sums": (kernels.column_sums(x), x.double().sum(0))})


TABLES = [(5, 3, 16), (700, 273, 48), (200, 130, 300), *on_gpu((69_632, 273, 256))]


@pytest.mark.parametrize("rows, symbols, width", TABLES)
def test_table_gradient(rows, symbols, width):
    tokens = torch.randint(symbols, (rows,), device=DEVICE)
    gradient = torch.randn(rows, width, device=DEVICE).to(KIND)
    expected = table_gradient(tokens, gradient.double(), symbols)
    found = kernels.table_gradient(tokens, gradient, symbols)
    assert_near(1e-5 if INTERPRETED else 1e-2, {"gradient": (found, expected)})
