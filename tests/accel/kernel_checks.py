"""Our Triton kernels against their references: `python kernel_checks.py cuda`.

Most of the time goes into compiling them: `cuda 0/8` to `cuda 7/8` share the cases out.

On a CPU (`TRITON_INTERPRET=1 python kernel_checks.py cpu`) Triton's interpreter runs them, in
fp32, since it knows no bf16. A process of its own, because the interpreter is chosen when Triton
is imported. Fresh random inputs each time; NaN never passes.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtrain.accel.triton import embedding as table
from memtrain.accel.triton import mlp, norm
from memtrain.accel.triton.block import KernelBlock
from memtrain.accel.triton.column_sum import column_sums
from memtrain.accel.triton.qkv import run_projection
from memtrain.accel.triton_rollout import limits
from memtrain.accel.triton_rollout.stack import InferenceStack
from memtrain.accel.triton_rollout.step import WIDEST, InferenceCell, KernelSampler, begin, end
from memtrain.config import CellConfig, TeacherConfig
from memtrain.models.cells import TransformerCell
from memtrain.models.layers import Block, Rotary, Stack, normalize_memory, table_gradient
from memtrain.models.rnn import RNN, Sampler
from memtrain.models.teacher import Decoder


def relative_error(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm())


def check(name: str, error: float, limit: float) -> None:
    good = error <= limit  # nan is not
    print(f"{'ok ' if good else 'BAD'} {error:.2e} <= {limit:.0e}  {name}", flush=True)
    if not good:
        failed.append(name)


failed: list[str] = []


def block_case(device, kind, rows, length, heads, head_dim, keep, causal, update=True) -> None:
    """Both outputs and every gradient, against the reference in fp64."""
    width = 64
    reference = Block(width, heads, head_dim).double().to(device)
    for layer in (reference.attention_norm, reference.mlp_norm):
        nn.init.normal_(layer.weight)
    for weight in reference.parameters():
        weight.data = weight.data.to(kind).double()
    rotary = Rotary(head_dim).to(device)
    fast = Block(width, heads, head_dim).to(device)
    fast.load_state_dict(reference.state_dict())
    use_kernels(fast)
    x, u, *weights = torch.randn(4, rows, length, width, device=device).to(kind)
    weights = [weight if keep is None else weight[:, keep] for weight in weights]
    found = []
    for block in (reference, fast):
        wide = torch.float64 if block is reference else kind
        given = [part.detach().to(wide).requires_grad_() for part in ((x, u) if update else (x,))]
        with torch.autocast(device, kind, enabled=wide == torch.bfloat16):
            out = block(given[0], given[1] if update else None, rotary, keep, causal)
        loss = sum((one * weight.to(wide)).sum() for one, weight in zip(out, weights, strict=True))
        assert isinstance(loss, Tensor)
        found.append((*out, *torch.autograd.grad(loss, [*given, *block.parameters()])))
    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    name = f"block {kind} N{rows} L{length} H{heads} E{head_dim} {keep} causal={causal} {update=}"
    parts = ["stream", "update", "gradient of x", *["gradient of u"][: int(update)]]
    parts += [f"gradient of {name}" for name, _ in fast.named_parameters()]
    for part, expected, got in zip(parts, *found, strict=True):
        check(f"{name}: {part}", relative_error(got, expected), limit)
    kinds = [one.dtype for one in found[1][len(parts) - len(list(fast.parameters())) :]]
    assert set(kinds) == {torch.float32}, kinds


def projection_case(device, kind, sequences, length, width, heads, head_dim, parts, first) -> None:
    """Queries, keys and values, those of them in `parts`, against torch's product and `Rotary`.

    Parts are compared one by one: queries are scaled.
    """
    inner, scale = heads * head_dim, 0.3
    rotary = Rotary(head_dim).to(device)
    x = torch.randn(sequences, length, width, device=device).to(kind)
    weight = (torch.randn(len(parts) * inner, width, device=device) / width**0.5).to(kind)
    out = run_projection(
        x.flatten(0, 1),
        weight,
        *rotary.tables(kind),
        head_dim=head_dim,
        length=length,
        first=first,
        query_columns=inner * ("query" in parts),
        key_columns=inner * ("key" in parts),
        scale=scale,
    )
    assert out.dtype == kind
    qkv = (x.double() @ weight.double().T).unflatten(-1, (-1, heads, head_dim))
    positions = first + torch.arange(length, device=device)
    limit = 1e-5 if kind == torch.float32 else 5e-3
    if kind == torch.float32 and device == "cuda":
        limit = 2e-3  # tf32
    name = f"projection {kind} N{sequences} L{length} W{width} H{heads} E{head_dim} from {first}"
    got = out.unflatten(0, (sequences, length)).chunk(len(parts), dim=-1)
    for part, one, plain in zip(parts, got, qkv.chunk(len(parts), dim=-3), strict=True):
        expected = plain.squeeze(-3)
        if part != "value":
            expected = rotary(expected.transpose(1, 2), positions).transpose(1, 2)
        expected = expected.flatten(-2) * (scale if part == "query" else 1)
        check(
            f"{name}: {part} of {'+'.join(parts)}",
            relative_error(one, expected),
            limit,
        )


def mlp_case(device, kind, rows, width, hidden) -> None:
    """Each kernel's results against fp64."""

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(kind)

    # Far enough out for GELU's tails.
    x, up, bias = 4 * make(rows, width), make(hidden, width) / width**0.5, make(hidden)
    gradient, down = make(rows, width), make(width, hidden) / width**0.5
    before, after = mlp.run_up(x, up, bias, keep=True)
    _, only = mlp.run_up(x, up, bias, keep=False)
    of_before, shares = mlp.run_down_backward(gradient, down, before)
    wide = (x.double() @ up.double().T + bias.double()).requires_grad_()
    told = F.gelu(wide)
    told.backward(gradient.double() @ down.double())
    assert wide.grad is not None
    sums = torch.cat([wide.grad.sum(0), gradient.double().sum(0)])
    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    if kind == torch.float32 and device == "cuda":
        limit = 5e-3  # tf32
    name = f"mlp {kind} R{rows} W{width} O{hidden}"
    for part, got, expected in (
        ("before", before, wide),
        ("after", after, told),
        ("after, alone", only, told),
        ("gradient", of_before, wide.grad),
        ("sums", column_sums(shares), sums),
    ):
        check(f"{name}: {part}", relative_error(got, expected), limit)


def sums_case(device, rows, width) -> None:
    x = torch.randn(rows, width, device=device)
    error = relative_error(column_sums(x), x.double().sum(0))
    check(f"sums of columns R{rows} W{width}", error, 1e-5)


def table_case(device, rows, symbols, width) -> None:
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    tokens = torch.randint(symbols, (rows,), device=device)
    gradient = torch.randn(rows, width, device=device).to(kind)
    expected = table_gradient(tokens, gradient.double(), symbols)
    error = relative_error(table.table_gradient(tokens, gradient, symbols), expected)
    limit = 1e-5 if device == "cpu" else 1e-2
    check(f"gradient of a table R{rows} V{symbols} W{width}", error, limit)


def norm_case(device, kind, rows, width, add, through, wide_norm=False, **tile) -> None:
    """Sum, norm and gradients against fp64; `through`: the sum has a gradient of its own.

    `tile` changes how the backward pass runs.
    """

    def make() -> Tensor:
        return torch.randn(rows, width, device=device)

    # A stream much larger or smaller than 1, as deep ones are.
    x = (make() * 10 ** torch.randn(rows, 1, device=device)).to(kind)
    update = make().to(kind) if add else None
    normed_kind = torch.float32 if wide_norm else kind
    of_normed, of_total = make().to(normed_kind), make().to(kind) if through else None
    gain = torch.randn(width, device=device).to(kind).float()
    usual = norm.tiles
    norm.tiles = lambda *shape: usual(*shape) | (tile if shape[-1] else {})
    total, normed = norm.run_forward(x, update, gain, normed_kind)
    of_x, shares = norm.run_backward(total, gain, of_normed, of_total, kind)
    assert normed.dtype == normed_kind and of_x.dtype == kind
    norm.tiles = usual
    wide = (x.double() + (0 if update is None else update.double())).requires_grad_()
    weight = gain.double().requires_grad_()
    told = F.rms_norm(wide, (width,), weight, 1e-6)
    loss = (told * of_normed.double()).sum()
    if of_total is not None:
        loss = loss + (wide * of_total.double()).sum()
    wanted, of_gain = torch.autograd.grad(loss, [wide, weight])
    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    name = f"norm {kind} R{rows} W{width} {add=} {through=} {wide_norm=} {tile or ''}"
    # Gradients shrink as rows grow: row by row, or small rows alone would be seen.
    size = wanted.norm(dim=1, keepdim=True)
    for part, got, expected in (
        ("sum", total, wide),
        ("norm", normed, told),
        ("gradient", of_x / size, wanted / size),
        ("gradient of the gain", column_sums(shares), of_gain),
    ):
        check(f"{name}: {part}", relative_error(got, expected), limit)


def use_kernels(block: Block) -> None:
    block.fast = KernelBlock(block)


def recomputed_stack_case(device, kind, rows, length, width, keep) -> None:
    """A stack with all kernels hands updates on, and gives the same gradients when recomputed."""
    reference, fast = (Stack(width, 3, 2, 32).to(device) for _ in range(2))
    fast.load_state_dict(reference.state_dict())
    for block in fast.blocks:
        assert isinstance(block, Block)
        use_kernels(block)
    x = torch.randn(rows, length, width, device=device, requires_grad=True)
    expected = reference(x, queries=keep)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *reference.parameters()])
    with torch.autocast(device, kind, enabled=kind != torch.float32):
        out = checkpoint(lambda x: fast(x, queries=keep), x, use_reentrant=False)
    got = torch.autograd.grad((out * weights).sum(), [x, *fast.parameters()])
    limit = 1e-5 if kind == torch.float32 else 2.5e-2
    name = f"recomputed stack {kind} N{rows} L{length} W{width} {keep}"
    check(f"{name}: output", relative_error(out, expected), limit)
    names = ["input", *(name for name, _ in fast.named_parameters())]
    for part, one, other in zip(names, got, wanted, strict=True):
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def replayed_case(device) -> None:
    """Gradients of a captured graph equal those computed directly, to the bit."""
    stack = Stack(256, 3, 8, 64).to(device)
    for block in stack.blocks:
        assert isinstance(block, Block)
        use_kernels(block)
        for weight in block.parameters():
            weight.data = weight.data.bfloat16() if weight.dim() > 1 else weight.data
    weights = list(stack.blocks.parameters())
    x = torch.randn(100, 272, 256, device=device).bfloat16()

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(stack(x, queries=slice(-16, None)).square().sum(), weights)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            replayed = gradients()
        for round_ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            pairs = zip(replayed, gradients(), strict=True)
            different = sum(not torch.equal(one, other) for one, other in pairs)
            check(f"replayed gradients, round {round_}", float(different), 0.0)


def stack_case(device, rows, length, width, layers, heads, head_dim, keep, causal, **path) -> None:
    """A whole stack without autograd, and again after its weights have changed.

    `path` moves row counts at which other kernels take over, to reach them with few rows.
    """
    usual = {key: getattr(limits, key) for key in path}
    for key, value in path.items():
        setattr(limits, key, value)
    stack = Stack(width, layers, heads, head_dim).to(device)
    x = torch.randn(rows, length, width, device=device)
    head = nn.Linear(width, 40, bias=False).to(device)
    fast = InferenceStack(stack, head)
    limit = 1.5e-2
    if device == "cpu":
        limit = 1e-5
    name = f"stack N{rows} L{length} W{width} {keep} causal={causal} {path}"
    for change in ("fresh", "refreshed"):
        with torch.no_grad():
            for part, end in (("stack", None), ("head", head)):
                expected = stack(x, queries=keep, causal=causal, head=end)
                stack.fast = fast
                out = stack(x, queries=keep, causal=causal, head=end)
                stack.fast = None
                check(f"{name}: {change} {part}", relative_error(out, expected), limit)
            for parameter in [*stack.parameters(), *head.parameters()]:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            fast.refresh()
    for key, value in usual.items():
        setattr(limits, key, value)


def repeated_case(device, rows, length, width, heads, head_dim, causal) -> None:
    """Every time the same bits: not where memory is handed on before it has been read."""
    stack = Stack(width, 1, heads, head_dim).to(device)
    fast = InferenceStack(stack)
    x = torch.randn(rows, length, width, device=device)
    with torch.no_grad():
        first, *others = (fast(x, slice(None), causal, None) for _ in range(20))
    different = sum(not torch.equal(first, other) for other in others)
    check(f"stack N{rows} L{length} W{width}: other times other results", different, 0.5)


def cell_case(device, rows, memory_tokens, width, layers, heads, head_dim, **path) -> None:
    """A whole cell without autograd over a few steps, and again after its weights have changed."""
    usual = {key: getattr(limits, key) for key in path}
    for key, value in path.items():
        setattr(limits, key, value)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3}.get(limits.PRODUCTS, 2e-2)
    size = {"memory_tokens": memory_tokens, "memory_dim": width, "width": width}
    config = CellConfig(**size, layers=layers, heads=heads, head_dim=head_dim)
    cell = TransformerCell(config, 40).to(device)
    fast_stack = InferenceStack(cell.stack)
    fast = InferenceCell(cell.embedding, fast_stack)
    tokens = torch.randint(40, (rows, 2), device=device)
    name = f"cell B{rows} M{memory_tokens} W{width} {path or ''}"
    with torch.no_grad():
        for change in ("fresh", "refreshed"):
            memory = torch.randn(rows, memory_tokens, width, device=device)
            expected = memory
            for token in tokens.unbind(1):  # not side by side
                expected = cell(expected, token)
                cell.fast = fast
                memory = cell(memory, token)
                cell.fast = None
            assert memory.dtype == expected.dtype
            check(f"{name}: {change}", relative_error(memory, expected), limit)
            for parameter in cell.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            fast_stack.refresh()
    for key, value in usual.items():
        setattr(limits, key, value)


def begin_and_end_case(device, rows, memory_tokens, width) -> None:
    """Rows before the stack are exact, their squares and the norms behind it in fp32."""
    memory = torch.randn(rows, memory_tokens, width, device=device)
    table = torch.randn(40, width, device=device)
    token = torch.randint(40, (rows,), device=device)
    x, squares = begin(memory, token, table)
    expected = torch.cat([memory, table[token][:, None]], dim=1).flatten(0, 1)
    name = f"B{rows} M{memory_tokens} W{width}"
    wrong = (x != expected.to(x.dtype)).sum()
    check(f"begin {name}: rows", float(wrong), 0)
    assert (squares is None) == (len(x) <= limits.FEW_ROWS)
    if squares is not None:
        wanted = expected.double().square().sum(1)
        check(f"begin {name}: squares", relative_error(squares[0], wanted), 1e-5)
    stack = Stack(width, 1, 2, 32).to(device)
    with torch.no_grad():
        stack.norm.weight.add_(torch.randn_like(stack.norm.weight))
        # Small and large rows: the two norms' epsilon must be where it belongs.
        y = expected * 10 ** torch.linspace(-5, 5, len(expected), device=device)[:, None]
        wanted = normalize_memory(stack.norm(y.double()))
        check(f"end {name}", relative_error(end(y, stack.norm.weight), wanted), 1e-5)


def sampler_case(device, rows, symbols, kind=torch.float32, **options) -> None:
    """The tokens of `Sampler`, wherever its chance is clear of a boundary by more than rounding."""
    plain = Sampler(**options)
    fast = KernelSampler(plain, plain.temperature, plain.allowed)
    logits = (3 * torch.randn(rows, symbols + 3, device=device)).to(kind)[:, :symbols]
    logits[:, 1::3] = float("-inf")  # no probability at all
    chance = torch.rand(rows, 2, device=device)[:, 0]
    chance[0] = 0.0
    drawn, expected = fast(logits, chance), plain(logits, chance)
    allowed = logits[:, : plain.allowed or symbols].double()
    total = (allowed / plain.temperature).softmax(dim=-1).cumsum(dim=-1)
    clear = (total - chance.double()[:, None]).abs().amin(dim=1) > 1e-5
    clear[0] = True
    name = f"sampler B{rows} V{symbols} {kind} {options or ''}"
    check(f"{name}: other tokens", float((drawn != expected)[clear].sum()), 0)
    check(f"{name}: unlikely tokens", float(allowed.gather(1, drawn[:, None]).isinf().sum()), 0)
    # Many symbols leave little room between boundaries; a few rows may all lie near one.
    check(f"{name}: near a boundary", float((~clear).sum()) / rows, 0.2 if rows >= 32 else 0.9)
    assert drawn.dtype == expected.dtype and drawn.shape == expected.shape
    empty = torch.full_like(logits[:1], float("nan"))
    check(f"{name}: from nan", float(fast(empty, chance).abs().max()), 0)
    ends = torch.tensor([0.0, 1 - 2**-24, 1.0], device=device)
    few = torch.tensor([float("-inf"), 0.3, 0.2, 0.1, float("-inf")], device=device).expand(3, 5)
    check(f"{name}: ends", 0.0 if fast(few, ends).tolist() == [1, 3, 3] else torch.nan, 0)


def rnn_case() -> None:
    """A rollout through graphs and kernels stays with the plain loop under autocast."""
    from memtrain.accel.engine import Engine
    from memtrain.config import EngineConfig

    cell = TransformerCell(CellConfig(layers=4), 256)
    rnn = RNN(cell, Decoder(TeacherConfig(), 256, 256)).cuda()
    engine = Engine(EngineConfig(device="cuda"))
    tokens = torch.randint(256, (8, 40), device="cuda")
    uniforms = torch.rand(20, 8, device="cuda")

    def choose(logits: Tensor, chance: Tensor) -> Tensor:
        return (chance * logits.shape[-1]).long()

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
    check("sampled tokens", float((first != fast_first)[clear].sum()), 0)
    for step in (0, 15, 16, 39):
        check(f"rollout, step {step}", relative_error(out[:, step], expected[:, step]), 5e-2)
    check("written tokens", float((written != fast_written).sum()), 0)
    check("memory after writing", relative_error(fast_memory, memory), 5e-2)


def parts_case(device) -> None:
    """What an engine puts together: a step of generation in its parts, and who has none."""
    from memtrain.accel.fast_paths import kernel_sampler, rollout_kernels

    size = CellConfig(memory_tokens=3, memory_dim=64, width=64, layers=1, heads=2, head_dim=32)
    teacher = TeacherConfig(width=64, decoder_layers=1, heads=2, head_dim=32)
    rnn = RNN(TransformerCell(size, 40), Decoder(teacher, 40, 64)).to(device)
    memory, chance = torch.randn(5, 3, 64, device=device), torch.rand(5, device=device)
    parts, choose = rollout_kernels(rnn), kernel_sampler(Sampler())
    assert isinstance(choose, KernelSampler)
    assert kernel_sampler(greedy := Sampler(temperature=0.0)) is greedy
    with torch.no_grad():
        logits, token = rnn.predict(memory), Sampler()(rnn.predict(memory), chance)
        after = rnn.cell(memory, token)
        with parts.active():
            check("parts: logits", relative_error(rnn.predict(memory), logits), 1.5e-2)
            check("parts: token", float((choose(logits, chance) != token).sum()), 0)
            check("parts: memory", relative_error(rnn.cell(memory, token), after), 1.5e-2)
    narrow = TransformerCell(replace(size, memory_dim=32), 40).to(device)
    parts = rollout_kernels(RNN(narrow, Decoder(teacher, 40, 32).to(device)))
    check("parts: other widths", float(len(parts.cells) + abs(len(parts.stacks) - 2)), 0)


def mlp_cases(device: str, kind: torch.dtype) -> list[Callable[[], None]]:
    shapes = [(5, 16, 64), (70, 48, 208), (130, 64, 256), (300, 48, 80)]
    if device == "cuda":
        shapes += [(rows, 256, 1024) for rows in (17, 2176, 10112, 20001, 40001, 69632)]
        shapes += [(999, 384, 1536)]
    return [partial(mlp_case, device, kind, *shape) for shape in shapes]


def projection_cases(device: str, kind: torch.dtype) -> list[Callable[[], None]]:
    whole = ("query", "key", "value")
    shapes: list[tuple] = [
        (5, 17, 32, 2, 16, whole, 0),
        (3, 79, 48, 4, 32, whole, 0),
        (7, 10, 64, 2, 64, ("query",), 7),
        (2, 70, 64, 2, 64, ("key", "value"), 0),
        (2, 5, 16, 1, 64, ("key",), 3),
    ]
    if device == "cuda":
        shapes = [shape for shape in shapes if shape[4] > 16]  # Triton 3.6 gets 16 columns wrong
        shapes += [(count, 272, 256, 8, 64, whole, 0) for count in (1, 16, 256)]
        shapes += [(300, 79, 256, 8, 64, whole, 0), (700, 17, 256, 3, 64, whole, 0)]
        shapes += [(256, 16, 256, 8, 64, ("query",), 256), (700, 9, 256, 3, 32, ("query",), 8)]
        shapes += [(256, 272, 256, 8, 64, ("key", "value"), 0), (90, 79, 384, 8, 64, whole, 0)]
    return [partial(projection_case, device, kind, *shape) for shape in shapes]


def step_cases(device: str) -> list[Callable[[], None]]:
    cells = [(2, 3, 32, 1, 2, 32), (5, 16, 48, 2, 2, 32)]
    ends = [(2, 3, 32), (5, 16, 48)]
    samplers: list[tuple[int, int, dict]] = [
        (64, 5, {}),
        (200, 256, {}),
        (64, 300, {"temperature": 0.7, "allowed": 256}),
        (64, 40, {"temperature": 2.0, "allowed": 99}),
        (64, WIDEST, {}),
        (3, WIDEST + 1, {}),
    ]
    if device == "cuda":
        cells += [(batch, 16, 256, 3, 8, 64) for batch in (1, 3, 4, 32, 128, 2048, 5000)]
        ends += [(batch, 16, 256) for batch in (1, 3, 4, 32, 128, 2048, 5000)]
        samplers += [(batch, 256, {}) for batch in (1, 128, 2048, 70_000)]
    cases: list[Callable[[], None]] = [partial(cell_case, device, *cell) for cell in cells]
    cases.append(partial(cell_case, device, *cells[1], FEW_ROWS=0, FUSED_ROWS=0, CHUNK_ROWS=40))
    # The two kernels for very many rows: tiles that are not full, sequences left to the others, few
    # and not so few of them (the interpreter stands for two processors), several turns and one.
    many = [(40, 16, 64, 2, 2, 32), (40, 8, 64, 2, 1, 64), (120, 4, 64, 2, 3, 64)]
    many += [(2, 3, 64, 1, 2, 32), (9, 41, 128, 2, 2, 64)]
    cases += [partial(cell_case, device, *cell, MANY_ROWS=0) for cell in many]
    if device == "cpu":  # rows of 16 bits come in pairs
        pairs = {"PRODUCTS": torch.float16, "WIDE_ROWS": 0, "MANY_ROWS": 0}
        cases.append(partial(cell_case, device, *many[0], **pairs))
    cases.append(partial(parts_case, device))
    cases += [partial(begin_and_end_case, device, *shape) for shape in ends]
    cases += [partial(sampler_case, device, *shape, **options) for *shape, options in samplers]
    if device == "cuda":
        cases.append(partial(sampler_case, device, 200, 256, torch.bfloat16))
    return cases


def norm_cases(device: str, kind: torch.dtype) -> list[Callable[[], None]]:
    shapes = [(1, 48), (37, 48), (70, 256), (5, 384)]
    if device == "cuda":
        shapes += [(rows, 256) for rows in (17, 2176, 10112, 20001, 69632)] + [(999, 384)]
    cases = [partial(norm_case, device, kind, *shape, True, True) for shape in shapes]
    for add, through in ((True, False), (False, False), (False, True)):
        cases.append(partial(norm_case, device, kind, 37, 48, add, through))
    cases.append(partial(norm_case, device, kind, 37, 48, True, False, True))
    # Programs that take several turns, the last of them beyond the end; loads made turns ahead.
    for stages in (1, 2, 3):
        turns = {"BR": 4, "per_processor": 1, "num_warps": 4, "STAGES": stages}
        shape = (30, 48) if device == "cpu" else (3001, 256)
        cases.append(partial(norm_case, device, kind, *shape, True, True, **turns))
    return cases


def all_cases(device: str) -> list[Callable[[], None]]:
    if device == "cpu":
        limits.PRODUCTS = torch.float32
        kinds, shapes = (torch.float32,), [(2, 17), (1, 70), (2, 5), (1, 100)]
        heads = ((2, 32),)
    else:
        kinds = (torch.bfloat16,)  # on a GPU only bf16 takes this path
        shapes = [
            (3, 17),
            (2, 79),
            (4, 272),
            (40, 272),
            (3, 204),
            (2, 300),
            (5, 16),
            (1000, 17),
            (9000, 17),
        ]
        heads = ((8, 64), (2, 32))
    cases: list[Callable[[], None]] = [
        partial(block_case, device, kind, rows, length, count, size, keep, causal)
        for kind, (rows, length), (count, size), causal in product(
            kinds, shapes, heads, (False, True)
        )
        for keep in (None, slice(-3, None), slice(4))
    ]
    for kind in kinds:
        cases += mlp_cases(device, kind) + norm_cases(device, kind)
        cases += projection_cases(device, kind)
        cases.append(partial(block_case, device, kind, 3, 17, *heads[0], None, False, False))
    for shape in ((5, 3, 16), (700, 273, 48), (200, 130, 300)):
        cases.append(partial(table_case, device, *shape))
    if device == "cuda":
        cases.append(partial(table_case, device, 69_632, 273, 256))
    for shape in ((1, 16), (300, 40), (1088, 1280)):
        cases.append(partial(sums_case, device, *shape))
    for keep in (None, slice(-2, None)):
        cases.append(partial(recomputed_stack_case, device, kinds[0], 3, 17, 32, keep))
    stacks = [
        (5, 17, 64, 2, 2, 32, slice(16), False),
        (3, 4, 32, 1, 2, 32, slice(3, None), True),
        (1, 7, 48, 1, 2, 32, None, True),
    ]
    if device == "cuda":
        stacks += [
            (batch, length, 256, 3, 8, 64, keep, causal)
            for batch in (1, 2, 33, 128, 2048, 5000)
            for length, keep, causal in ((17, slice(16), False), (16, slice(15, None), True))
        ]
        # Few rows that are too wide to be read at once.
        stacks += [(batch, 17, 512, 3, 8, 64, slice(16), False) for batch in (1, 3, 128)]
        cases += [rnn_case, partial(replayed_case, device)]
        cases += [partial(repeated_case, device, 2048, 17, 256, 8, 64, False)]
        cases += [partial(repeated_case, device, 2048, 16, 256, 8, 64, True)]
    cases += [partial(stack_case, device, *stack) for stack in stacks]
    cases += step_cases(device)
    many = (18, 16, 64, 2, 2, 32, slice(15, None), True)  # 16 fill their tiles
    cases.append(partial(stack_case, device, *many, MANY_ROWS=0))
    return cases + [
        partial(stack_case, device, *stacks[0], **path)
        for path in (
            {"FEW_ROWS": 0},
            {"FEW_ROWS": 0, "FUSED_ROWS": 0},
            {"FEW_ROWS": 0, "FUSED_ROWS": 0, "PLAIN_ROWS": 0, "CHUNK_ROWS": 40},
        )
    ]


def main(device: str, share: str = "0/1") -> None:
    torch.manual_seed(torch.seed() % 2**31)
    own, count = (int(part) for part in share.split("/"))
    for case in all_cases(device)[own::count]:
        case()
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main(*sys.argv[1:])
