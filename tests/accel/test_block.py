"""A Transformer block from kernels against the reference: outputs and all gradients."""

from itertools import product

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
    relative_error,
    seeded_and_poisoned,  # noqa: F401
    shape_id,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtrain.accel.triton.block import KernelBlock
from memtrain.models.layers import Block, Rotary, Stack

pytestmark = MARKS
WIDTH = 64
QUERIES = {"all": None, "last": slice(-3, None), "first": slice(4)}


def block_cases():
    """Rows and lengths x heads x masks x kept positions."""
    shapes = [(2, 17), (1, 70), (2, 5), (1, 100)]
    if not INTERPRETED:
        shapes = [(3, 17), (2, 79), (4, 272), (40, 272), (3, 204), (2, 300), (5, 16)]
        shapes += [(1000, 17), (9000, 17)]
    heads = [*on_gpu((8, 64)), (2, 32)]
    cases = [
        (*shape, *head, kept, causal, True)
        for shape, head, causal, kept in product(shapes, heads, (False, True), QUERIES)
    ]
    cases.append((3, 17, *heads[0], "all", False, False))
    for case in cases:
        *shape, kept, causal, update = case
        name = f"{shape_id('NLHE', *shape)}-{kept}{'' if update else '-no_update'}"
        yield pytest.param(*case, id=name + ("-causal" if causal else ""))


def new_block(heads: int, head_dim: int) -> Block:
    """A block whose weights are exact in the kernels' precision."""
    block = Block(WIDTH, heads, head_dim).double().to(DEVICE)
    for layer in (block.attention_norm, block.mlp_norm):
        nn.init.normal_(layer.weight)
    for weight in block.parameters():
        weight.data = weight.data.to(KIND).double()
    return block


def new_inputs(rows: int, length: int) -> Tensor:
    """Stream, update, and the weights of both outputs in the loss."""
    return torch.randn(4, rows, length, WIDTH, device=DEVICE).to(KIND)


def run_block(
    block: Block, inputs: Tensor, kept: str, causal: bool, update: bool, fraction: float = 1.0
) -> list[Tensor]:
    """Both outputs and all gradients: of the inputs, then of the parameters."""
    kind = torch.float64 if block.fast is None else KIND
    x, u, *weights = inputs.to(kind)
    given = [part.detach().requires_grad_() for part in ((x, u) if update else (x,))]
    rotary, queries = Rotary(block.attention.head_dim, fraction).to(DEVICE), QUERIES[kept]
    with torch.autocast(DEVICE, KIND, enabled=kind == torch.bfloat16):
        out = block(given[0], given[1] if update else None, rotary, queries, causal)
    weights = [weight if queries is None else weight[:, queries] for weight in weights]
    loss = sum((one * weight).sum() for one, weight in zip(out, weights, strict=True))
    assert isinstance(loss, Tensor)
    return [*out, *torch.autograd.grad(loss, [*given, *block.parameters()])]


def with_kernels(reference: Block) -> Block:
    block = Block(WIDTH, reference.attention.heads, reference.attention.head_dim).to(DEVICE)
    block.load_state_dict(reference.state_dict())
    block.fast = KernelBlock(block)
    return block


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    def run(rows, length, heads, head_dim, kept, causal, update):
        block = with_kernels(new_block(heads, head_dim))
        run_block(block, new_inputs(rows, length), kept, causal, update)

    compile_ahead(request, test_block, run)


@pytest.mark.parametrize("rows, length, heads, head_dim, kept, causal, update", list(block_cases()))
def test_block(rows, length, heads, head_dim, kept, causal, update):
    reference, inputs = new_block(heads, head_dim), new_inputs(rows, length)
    expected = run_block(reference, inputs, kept, causal, update)
    found = run_block(with_kernels(reference), inputs, kept, causal, update)
    assert_block(reference, found, expected, update)


@pytest.mark.parametrize("kept", QUERIES)
@pytest.mark.parametrize("shape", [(2, 17, 2, 32), *on_gpu((40, 272, 8, 64), (1000, 17, 8, 64))])
def test_block_with_half_of_each_head_rotated(shape, kept):
    rows, length, heads, head_dim = shape
    reference, inputs = new_block(heads, head_dim), new_inputs(rows, length)
    reference.attention.project_in.weight.data *= 4  # scores so large that positions matter
    expected = run_block(reference, inputs, kept, False, True, fraction=0.5)
    whole = run_block(reference, inputs, kept, False, True)
    assert max(map(relative_error, whole, expected)) > 0.1
    found = run_block(with_kernels(reference), inputs, kept, False, True, fraction=0.5)
    assert_block(reference, found, expected, update=True)


def assert_block(reference: Block, found: list[Tensor], expected: list[Tensor], update: bool):
    parts = ["stream", "update", "gradient of x", *["gradient of the update"] * update]
    assert {one.dtype for one in found[len(parts) :]} == {torch.float32}
    parts += [f"gradient of {name}" for name, _ in reference.named_parameters()]
    pairs = zip(found, expected, strict=True)
    assert_near(1e-5 if INTERPRETED else 1.5e-2, dict(zip(parts, pairs, strict=True)))


def new_stack(width: int, layers: int, heads: int, head_dim: int) -> Stack:
    stack = Stack(width, layers, heads, head_dim).to(DEVICE)
    for block in stack.blocks:
        assert isinstance(block, Block)
        block.fast = KernelBlock(block)
    return stack


@pytest.mark.parametrize("queries", [None, slice(-2, None)], ids=["all", "last"])
def test_recomputed_stack(queries):
    """A stack passes updates on, and has the same gradients when activations are recomputed."""
    reference, fast = Stack(32, 3, 2, 32).to(DEVICE), new_stack(32, 3, 2, 32)
    fast.load_state_dict(reference.state_dict())
    x = torch.randn(3, 17, 32, device=DEVICE, requires_grad=True)
    expected = reference(x, queries=queries)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *reference.parameters()])
    with torch.autocast(DEVICE, KIND, enabled=not INTERPRETED):
        out = checkpoint(lambda x: fast(x, queries=queries), x, use_reentrant=False)
    found = torch.autograd.grad((out * weights).sum(), [x, *fast.parameters()])
    names = ["input", *(name for name, _ in fast.named_parameters())]
    gradients = dict(zip(names, zip(found, wanted, strict=True), strict=True))
    assert_near(1e-5 if INTERPRETED else 2.5e-2, {"output": (out, expected), **gradients})


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_replayed_gradients_are_bit_exact():
    """A captured graph has the same gradients as direct calls."""
    stack = new_stack(256, 3, 8, 64)
    for weight in stack.blocks.parameters():
        weight.data = weight.data.bfloat16() if weight.dim() > 1 else weight.data
    weights = list(stack.blocks.parameters())
    x = torch.randn(100, 272, 256, device=DEVICE).bfloat16()

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(stack(x, queries=slice(-16, None)).square().sum(), weights)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            replayed = gradients()
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert all(map(torch.equal, replayed, gradients()))
