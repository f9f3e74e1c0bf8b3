"""The kernels around the stacks of a rollout step: the cell's input, its norms, and sampling."""

import pytest
import torch
from kernel_testing import (
    DEVICE,
    MARKS,
    assert_near,
    on_gpu,
    seeded_and_poisoned,  # noqa: F401
    shape_id,
)

from memtrain.accel.triton.rollout_linear import LIMITS
from memtrain.accel.triton.rollout_step import (
    MAX_SYMBOLS,
    KernelSampler,
    cell_input,
    two_norms,
)
from memtrain.models.layers import Stack, normalize_memory
from memtrain.models.sampler import Sampler

pytestmark = MARKS

SHAPES = [(2, 3, 32), (5, 16, 48)]
SHAPES += on_gpu(*((batch, 16, 256) for batch in (1, 3, 4, 32, 128, 2048, 5000)))


@pytest.mark.parametrize(
    "rows, tokens, width", [pytest.param(*shape, id=shape_id("BMW", *shape)) for shape in SHAPES]
)
def test_cell_input_and_norms(rows, tokens, width):
    """The input is exact; its squares and the norms after the stack are in fp32."""
    memory = torch.randn(rows, tokens, width, device=DEVICE)
    table = torch.randn(40, width, device=DEVICE)
    token = torch.randint(40, (rows,), device=DEVICE)
    x, squares = cell_input(memory, token, table)
    expected = torch.cat([memory, table[token][:, None]], dim=1).flatten(0, 1)
    assert torch.equal(x, expected.to(x.dtype))
    assert (squares is None) == (len(x) <= LIMITS.few_rows)
    if squares is not None:
        assert_near(1e-5, {"squares": (squares[0], expected.double().square().sum(1))})
    stack = Stack(width, 1, 2, 32).to(DEVICE)
    with torch.no_grad():
        stack.norm.weight.add_(torch.randn_like(stack.norm.weight))
        # Small and large rows: the epsilons of both norms must be in the right place.
        y = expected * 10 ** torch.linspace(-5, 5, len(expected), device=DEVICE)[:, None]
        wanted = normalize_memory(stack.norm(y.double()))
        assert_near(1e-5, {"norms": (two_norms(y, stack.norm.weight), wanted)})


SAMPLERS = [
    (64, 5, torch.float32, {}),
    (200, 256, torch.float32, {}),
    (64, 300, torch.float32, {"temperature": 0.7, "allowed": 256}),
    (64, 40, torch.float32, {"temperature": 2.0, "allowed": 99}),
    (64, MAX_SYMBOLS, torch.float32, {}),
    (3, MAX_SYMBOLS + 1, torch.float32, {}),
    *on_gpu(
        *((batch, 256, torch.float32, {}) for batch in (1, 128, 2048, 70_000)),
        (200, 256, torch.bfloat16, {}),
    ),
]


def sampler_id(rows: int, symbols: int, kind: torch.dtype, options: dict) -> str:
    return (
        shape_id("BV", rows, symbols) + f"-{kind}" + "".join(f"-{k}{options[k]}" for k in options)
    )


@pytest.mark.parametrize(
    "rows, symbols, kind, options",
    [pytest.param(*case, id=sampler_id(*case).replace("torch.", "")) for case in SAMPLERS],
)
def test_sampler(rows, symbols, kind, options):
    """The tokens of `Sampler`, except where a uniform number is within rounding of a boundary."""
    plain = Sampler(**options)
    fast = KernelSampler(plain, plain.temperature, plain.allowed)
    logits = (3 * torch.randn(rows, symbols + 3, device=DEVICE)).to(kind)[:, :symbols]
    logits[:, 1::3] = float("-inf")  # of probability 0
    uniform = torch.rand(rows, 2, device=DEVICE)[:, 0]
    uniform[0] = 0.0
    drawn, expected = fast(logits, uniform), plain(logits, uniform)
    allowed = logits[:, : plain.allowed or symbols].double()
    total = (allowed / plain.temperature).softmax(dim=-1).cumsum(dim=-1)
    clear = (total - uniform.double()[:, None]).abs().amin(dim=1) > 1e-5
    clear[0] = True
    assert not (drawn != expected)[clear].any()
    assert not allowed.gather(1, drawn[:, None]).isinf().any()
    # Many symbols leave little space between boundaries; a few rows may all be near one.
    assert float((~clear).sum()) / rows <= (0.2 if rows >= 32 else 0.9)
    assert drawn.dtype == expected.dtype and drawn.shape == expected.shape
    of_nan = fast(torch.full_like(logits[:1], float("nan")), uniform[:1])
    assert not of_nan.any()
    ends = torch.tensor([0.0, 1 - 2**-24, 1.0], device=DEVICE)
    few = torch.tensor([float("-inf"), 0.3, 0.2, 0.1, float("-inf")], device=DEVICE).expand(3, 5)
    assert fast(few, ends).tolist() == [1, 3, 3]
