"""Stacks and cells from a rollout's kernels against the references, without autograd."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_testing import (
    DEVICE,
    INTERPRETED,
    MARKS,
    assert_near,
    compile_ahead,
    limits,  # noqa: F401
    on_gpu,
    relative_error,
    seeded_and_poisoned,  # noqa: F401
    shape_id,
)
from torch import Tensor, nn

from memtrain.accel.fast_paths import kernel_sampler, rollout_kernels
from memtrain.accel.triton.rollout_linear import LIMITS
from memtrain.accel.triton.rollout_stack import InferenceStack
from memtrain.accel.triton.rollout_step import InferenceCell, KernelSampler
from memtrain.config import CellConfig, TeacherConfig
from memtrain.models.cells import TransformerCell
from memtrain.models.layers import Stack
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler
from memtrain.models.teacher import Decoder

pytestmark = MARKS


def stack_cases():
    """Shape, kept positions, mask, and limits to move."""
    stacks = [
        (5, 17, 64, 2, 2, 32, slice(16), False),
        (3, 4, 32, 1, 2, 32, slice(3, None), True),
        (1, 7, 48, 1, 2, 32, None, True),
        *on_gpu(
            *(
                (batch, length, 256, 3, 8, 64, queries, causal)
                for batch in (1, 2, 33, 128, 2048, 5000)
                for length, queries, causal in ((17, slice(16), False), (16, slice(15, None), True))
            ),
            # Heads that together are narrower than the stream.
            *((batch, 9, 256, 2, 4, 32, slice(8), False) for batch in (1, 3, 64, 128, 2048)),
            # Few rows that are too wide to be read at once.
            *((batch, 17, 512, 3, 8, 64, slice(16), False) for batch in (1, 3, 128)),
        ),
    ]
    cases = [(*stack, {}) for stack in stacks]
    # Sequences of 16 fill their tiles.
    cases.append((18, 16, 64, 2, 2, 32, slice(15, None), True, {"large_batch_rows": 0}))
    moved = {"few_rows": 0}, {"fused_rows": 0}, {"plain_rows": 0, "chunk_rows": 40}
    for count in (1, 2, 3):
        path = {name: value for some in moved[:count] for name, value in some.items()}
        cases.append((*stacks[0], path))
    for case in cases:
        name = shape_id("NLWBHE", *case[:6]) + "".join(f"-{key}{v}" for key, v in case[8].items())
        yield pytest.param(*case, id=name)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    def run(rows, length, width, layers, heads, head_dim, queries, causal, path):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in path.items():
                patch.setattr(LIMITS, name, value)
            fast = InferenceStack(stack := Stack(width, layers, heads, head_dim).to(DEVICE))
            fast(
                torch.randn(rows, length, width, device=DEVICE),
                queries or slice(None),
                causal,
                None,
            )
            assert stack.fast is None

    compile_ahead(request, test_stack, run)


@pytest.mark.parametrize(
    "rows, length, width, layers, heads, head_dim, queries, causal, path", list(stack_cases())
)
def test_stack(rows, length, width, layers, heads, head_dim, queries, causal, path, limits):  # noqa: F811
    """A whole stack with and without a head, and again after its weights have changed."""
    limits(**path)
    stack = Stack(width, layers, heads, head_dim).to(DEVICE)
    x = torch.randn(rows, length, width, device=DEVICE)
    head = nn.Linear(width, 40, bias=False).to(DEVICE)
    fast, parts = InferenceStack(stack, head), {}
    for change in ("fresh", "refreshed"):
        with torch.no_grad():
            for name, end in (("stack", None), ("head", head)):
                expected = stack(x, queries=queries, causal=causal, head=end)
                stack.fast = fast
                found = stack(x, queries=queries, causal=causal, head=end)
                stack.fast = None
                parts[f"{change} {name}"] = found, expected
            for parameter in [*stack.parameters(), *head.parameters()]:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            fast.refresh()
    assert_near(1e-5 if INTERPRETED else 1.5e-2, parts)


@pytest.mark.parametrize(
    "path",
    [{}, {"few_rows": 0}, {"few_rows": 0, "fused_rows": 0}, {"large_batch_rows": 0}],
    ids=["few", "fused", "many", "large batch"],
)
@pytest.mark.parametrize("size", [(18, 16, 64, 2, 2, 32), *on_gpu((600, 16, 256, 3, 8, 64))])
def test_stack_with_half_of_each_head_rotated_and_a_biased_head(size, path, limits):  # noqa: F811
    limits(**path)
    rows, length, *shape = size
    width = shape[0]
    stack = Stack(*shape, rotary_fraction=0.5).to(DEVICE)
    for name, weight in stack.named_parameters():
        if "project_in" in name:
            weight.data *= 4  # scores so large that positions matter
    whole = Stack(*shape).to(DEVICE)
    whole.load_state_dict(stack.state_dict())
    head = nn.Linear(width, 40).to(DEVICE)
    nn.init.normal_(head.bias)
    x = torch.randn(rows, length, width, device=DEVICE)
    options = {"queries": slice(length - 1, None), "causal": True, "head": head}
    with torch.no_grad():
        expected = stack(x, **options)
        assert relative_error(whole(x, **options), expected) > 0.1
        stack.fast = InferenceStack(stack, head)
        assert_near(1e-5 if INTERPRETED else 1.5e-2, {"logits": (stack(x, **options), expected)})


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("length, causal", [(17, False), (16, True)])
def test_repeated_calls_are_bit_exact(length, causal):
    """Shared memory must not be overwritten before it has been read."""
    fast = InferenceStack(Stack(256, 1, 8, 64).to(DEVICE))
    x = torch.randn(2048, length, 256, device=DEVICE)
    with torch.no_grad():
        first, *others = (fast(x, slice(None), causal, None) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)


def cell_cases():
    """Rows, memory tokens, width, layers, heads, head size, and limits to move."""
    cells = [(2, 3, 32, 1, 2, 32), (5, 16, 48, 2, 2, 32)]
    cells += on_gpu(*((batch, 16, 256, 3, 8, 64) for batch in (1, 3, 4, 32, 128, 2048, 5000)))
    cases = [(*cell, {}) for cell in cells]
    cases.append((*cells[1], {"few_rows": 0, "fused_rows": 0, "chunk_rows": 40}))
    # The kernels for large batches: tiles that are not full, sequences left to the other kernels,
    # few and more of them (the interpreter counts as two processors), several iterations and one.
    large = [(40, 16, 64, 2, 2, 32), (40, 8, 64, 2, 1, 64), (120, 4, 64, 2, 3, 64)]
    large += [(2, 3, 64, 1, 2, 32), (9, 41, 128, 2, 2, 64)]
    cases += [(*cell, {"large_batch_rows": 0}) for cell in large]
    if INTERPRETED:  # 16-bit rows are read in pairs
        path = {"precision": torch.float16, "wide_rows": 0, "large_batch_rows": 0}
        cases.append((*large[0], path))
    for case in cases:
        name = shape_id("BMWLHE", *case[:6]) + "".join(f"-{key}{v}" for key, v in case[6].items())
        yield pytest.param(*case, id=name)


@pytest.mark.parametrize("rows, tokens, width, layers, heads, head_dim, path", list(cell_cases()))
def test_cell(rows, tokens, width, layers, heads, head_dim, path, limits):  # noqa: F811
    """Two steps of a whole cell, and again after its weights have changed."""
    limits(**path)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3}.get(LIMITS.precision, 2e-2)
    sizes = dict(memory_tokens=tokens, memory_dim=width, width=width)
    config = CellConfig(**sizes, layers=layers, heads=heads, head_dim=head_dim)
    cell = TransformerCell(config, 40).to(DEVICE)
    fast_stack = InferenceStack(cell.stack)
    assert isinstance(cell.embedding, nn.Embedding)
    fast = InferenceCell(cell.embedding, fast_stack)
    inputs = torch.randint(40, (rows, 2), device=DEVICE)
    parts = {}
    with torch.no_grad():
        for change in ("fresh", "refreshed"):
            memory = expected = torch.randn(rows, tokens, width, device=DEVICE)
            for token in inputs.unbind(1):  # with a stride
                expected = cell(expected, token)
                cell.fast = fast
                memory = cell(memory, token)
                cell.fast = None
            assert memory.dtype == expected.dtype
            parts[change] = memory, expected
            for parameter in cell.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            fast_stack.refresh()
    assert_near(limit, parts)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_rollout_through_graphs():
    """A rollout through graphs and kernels stays close to the plain loop under autocast."""
    from memtrain.accel.engine import Engine
    from memtrain.config import EngineConfig

    cell = TransformerCell(CellConfig(layers=4), 256)
    rnn = RNN(cell, Decoder(TeacherConfig(), 256, 256)).cuda()
    engine = Engine(EngineConfig(device="cuda"))
    tokens = torch.randint(256, (8, 40), device="cuda")
    uniforms = torch.rand(20, 8, device="cuda")

    def choose(logits: Tensor, uniform: Tensor) -> Tensor:
        return (uniform * logits.shape[-1]).long()

    with torch.no_grad(), engine.autocast():
        expected = rnn.unroll(tokens)
        written, memory = rnn.write(expected[:, -1], uniforms, choose)
        logits = rnn.predict(expected[:, -1])
        first, _ = rnn.write(expected[:, -1], uniforms[:1], Sampler())
        engine.prepare(rnn)
        out = rnn.unroll(tokens)
        fast_written, fast_memory = rnn.write(expected[:, -1], uniforms, choose)
        fast_first, _ = rnn.write(expected[:, -1], uniforms[:1], Sampler())
    total = logits.double().softmax(dim=-1).cumsum(dim=-1)
    clear = (total - uniforms[0, :, None]).abs().amin(dim=1) > 2e-3
    assert not (first != fast_first)[clear].any()
    assert torch.equal(written, fast_written)
    steps = {f"step {step}": (out[:, step], expected[:, step]) for step in (0, 15, 16, 39)}
    assert_near(5e-2, {**steps, "memory after writing": (fast_memory, memory)})


def test_rollout_kernels():
    """The kernels of a whole step, and the models that have none."""
    shape: dict[str, Any] = {"width": 64, "heads": 2, "head_dim": 32, "rotary_fraction": 0.5}
    size = CellConfig(memory_tokens=3, memory_dim=64, layers=1, **shape)
    teacher = TeacherConfig(decoder_layers=1, head_bias=True, **shape)
    rnn = RNN(TransformerCell(size, 40), Decoder(teacher, 40, 64)).to(DEVICE)
    memory, uniform = torch.randn(5, 3, 64, device=DEVICE), torch.rand(5, device=DEVICE)
    parts, choose = rollout_kernels(rnn), kernel_sampler(Sampler())
    assert isinstance(choose, KernelSampler)
    assert kernel_sampler(greedy := Sampler(temperature=0.0)) is greedy
    with torch.no_grad():
        logits, token = rnn.predict(memory), Sampler()(rnn.predict(memory), uniform)
        after = rnn.cell(memory, token)
        with parts.active():
            assert relative_error(rnn.predict(memory), logits) <= 1.5e-2
            assert torch.equal(choose(logits, uniform), token)
            assert relative_error(rnn.cell(memory, token), after) <= 1.5e-2
    narrow = TransformerCell(replace(size, memory_dim=32), 40).to(DEVICE)
    parts = rollout_kernels(RNN(narrow, Decoder(teacher, 40, 32).to(DEVICE)))
    assert not parts.cells and len(parts.stacks) == 2
