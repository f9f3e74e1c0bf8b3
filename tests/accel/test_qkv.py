"""The projection to rotated queries, keys and values against torch's product and `Rotary`."""

import pytest
import torch
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

from memtrain.accel.triton.attention import query_scale
from memtrain.accel.triton.qkv import run_qkv
from memtrain.models.layers import Rotary

pytestmark = MARKS
ALL = "query key value"
CASES = [
    *([(5, 17, 32, 2, 16, ALL, 0)] if INTERPRETED else []),  # Triton 3.6 gets 16 columns wrong
    (3, 79, 48, 4, 32, ALL, 0),
    (7, 10, 64, 2, 64, "query", 7),
    (2, 70, 64, 2, 64, "key value", 0),
    (2, 5, 16, 1, 64, "key", 3),
    *on_gpu(
        *((count, 272, 256, 8, 64, ALL, 0) for count in (1, 16, 256)),
        (300, 79, 256, 8, 64, ALL, 0),
        (700, 17, 256, 3, 64, ALL, 0),
        (256, 16, 256, 8, 64, "query", 256),
        (700, 9, 256, 3, 32, "query", 8),
        (256, 272, 256, 8, 64, "key value", 0),
        (90, 79, 384, 8, 64, ALL, 0),
    ),
]


def new_inputs(sequences, length, width, heads, head_dim, parts) -> tuple[Tensor, Tensor, Rotary]:
    outer = len(parts.split()) * heads * head_dim
    x = torch.randn(sequences, length, width, device=DEVICE).to(KIND)
    weight = (torch.randn(outer, width, device=DEVICE) / width**0.5).to(KIND)
    return x, weight, Rotary(head_dim).to(DEVICE)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    def compile_case(heads, parts, first, **shape):
        x, weight, rotary = new_inputs(heads=heads, parts=parts, **shape)
        run_qkv(x, weight, *rotary.tables(KIND), heads, first, parts)

    compile_ahead(request, test_qkv, compile_case)


@pytest.mark.parametrize(
    "sequences, length, width, heads, head_dim, parts, first",
    [
        pytest.param(*case, id=f"{shape_id('NLWHE', *case[:5])}-{case[5]}-from{case[6]}")
        for case in CASES
    ],
)
def test_qkv(sequences, length, width, heads, head_dim, parts, first):
    """Parts are compared one by one, since queries are scaled."""
    x, weight, rotary = new_inputs(sequences, length, width, heads, head_dim, parts)
    out = run_qkv(x, weight, *rotary.tables(KIND), heads, first, parts)
    assert out.dtype == KIND
    names = parts.split()
    projected = (x.double() @ weight.double().T).unflatten(-1, (-1, heads, head_dim))
    positions = first + torch.arange(length, device=DEVICE)
    pairs = {}
    found = out.chunk(len(names), dim=-1)
    for name, one, plain in zip(names, found, projected.chunk(len(names), dim=-3), strict=True):
        expected = plain.squeeze(-3)
        if name != "value":
            expected = rotary(expected.transpose(1, 2), positions).transpose(1, 2)
        pairs[name] = one, expected.flatten(-2) * (query_scale(head_dim) if name == "query" else 1)
    assert_near(1e-5 if INTERPRETED else 5e-3, pairs)
