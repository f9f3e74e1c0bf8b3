"""Our Triton kernels against their references: `python kernel_checks.py cuda`.

Most of the time goes into compiling them: `cuda 0/8` to `cuda 7/8` share the cases out.

On a CPU (`TRITON_INTERPRET=1 python kernel_checks.py cpu`) Triton's interpreter runs them, in
fp32, since it knows no bf16. A process of its own, because the interpreter is chosen when Triton
is imported. Fresh random inputs each time; NaN never passes.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from memtrain.config import CellConfig, TeacherConfig
from memtrain.nn.blocks import Attention, Block, RMSNorm, Rotary, Stack
from memtrain.nn.cells import TransformerCell
from memtrain.nn.kernels import inference, mlp, norm
from memtrain.nn.kernels.attention import KernelAttention
from memtrain.nn.kernels.inference import InferenceStack
from memtrain.nn.kernels.mlp import KernelMLP
from memtrain.nn.kernels.norm import KernelNorm
from memtrain.nn.rnn import RNN
from memtrain.nn.teacher import Decoder


def relative_error(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm())


def check(name: str, error: float, limit: float) -> None:
    good = error <= limit  # nan is not
    print(f"{'ok ' if good else 'BAD'} {error:.2e} <= {limit:.0e}  {name}", flush=True)
    if not good:
        failed.append(name)


failed: list[str] = []


def attention_case(device, kind, rows, length, heads, head_dim, keep, causal) -> None:
    """Outputs and every gradient, against the reference in fp64."""
    width = 64
    reference = Attention(width, heads, head_dim).double().to(device)
    rotary = Rotary(head_dim).to(device)
    x = torch.randn(rows, length, width, device=device, dtype=torch.float64, requires_grad=True)
    expected = reference(x, rotary, keep, causal)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *reference.parameters()])

    fast = Attention(width, heads, head_dim).to(device, kind)
    fast.load_state_dict(reference.state_dict())
    fast.fast = KernelAttention()
    x = x.detach().to(kind).requires_grad_()
    out = fast(x, rotary, keep, causal)
    got = torch.autograd.grad((out * weights.to(kind)).sum(), [x, *fast.parameters()])

    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    name = f"attention {kind} N{rows} L{length} H{heads} E{head_dim} {keep} causal={causal}"
    check(f"{name}: output", relative_error(out, expected), limit)
    for part, one, other in zip(("input", "in", "out"), got, wanted, strict=True):
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def mlp_case(device, kind, rows, width, hidden, **tile) -> None:
    """Output and every gradient against fp64, in the usual tiles or with `tile` changed."""

    def layers(kind: torch.dtype) -> nn.Sequential:
        made = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        return made.to(device, kind)

    reference, fast = layers(torch.float64), layers(kind)
    fast.load_state_dict(reference.state_dict())
    # Far enough out for GELU's tails.
    x = 4 * torch.randn(rows, width, device=device, dtype=torch.float64)
    x = x.to(kind).double().requires_grad_()
    expected = reference(x)
    weights = torch.randn_like(expected).to(kind)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *reference.parameters()])

    usual = mlp.tiles
    mlp.tiles = lambda *shape: usual(*shape) | tile
    x = x.detach().to(kind).requires_grad_()
    out = KernelMLP()(fast, x)
    got = torch.autograd.grad((out * weights).sum(), [x, *fast.parameters()])
    mlp.tiles = usual

    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    if kind == torch.float32 and device == "cuda":
        limit = 5e-3  # tf32
    name = f"mlp {kind} R{rows} W{width} O{hidden} {tile or ''}"
    check(f"{name}: output", relative_error(out, expected), limit)
    for part, one, other in zip(
        ("input", "up", "up bias", "down", "down bias"), got, wanted, strict=True
    ):
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def norm_case(device, kind, rows, width, add, read, **tile) -> None:
    """Sum and norm and every gradient against fp64, of the outputs that are read.

    `tile` changes how the backward pass runs.
    """
    given = [torch.randn(rows, width, device=device, dtype=torch.float64) for _ in range(2)]
    # A stream much larger or smaller than 1, as deep ones are.
    x = (given[0] * 10 ** torch.randn(rows, 1, device=device)).to(kind)
    update = given[1].to(kind) if add else None
    weights = {name: torch.randn(rows, width, device=device).to(kind) for name in read}

    def run(kind: torch.dtype, fast: KernelNorm | None) -> tuple[dict, dict]:
        torch.manual_seed(rows)
        layer = RMSNorm(width, device=device)
        nn.init.normal_(layer.weight)
        # Rounded, as both do; a parameter in fp32 beside a stream in bf16.
        weight_kind = torch.promote_types(kind, torch.float32)
        layer.weight.data = layer.weight.data.to(x.dtype).to(weight_kind)
        inputs = {"x": x.to(kind).requires_grad_()}
        if update is not None:
            inputs["update"] = update.to(kind).requires_grad_()
        block = Block(width, 1, 16)
        block.fast_norm = fast
        total, normed = block.add_norm(layer, inputs["x"], inputs.get("update"))
        out = {"sum": total, "norm": normed}
        loss = torch.stack([(out[name] * weights[name].to(kind)).sum() for name in read]).sum()
        inputs |= {"weight": layer.weight} if "norm" in read else {}
        return out, dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))

    usual = norm.tiles
    norm.tiles = lambda *shape: usual(*shape) | (tile if shape[-1] else {})
    out, got = run(kind, KernelNorm())
    norm.tiles = usual
    expected, wanted = run(torch.float64, None)
    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    name = f"norm {kind} R{rows} W{width} add={add} {'+'.join(read)} {tile or ''}"
    for part in out:
        assert out[part].dtype == kind
        check(f"{name}: {part}", relative_error(out[part], expected[part]), limit)
    assert "weight" not in got or got["weight"].dtype == torch.float32
    for part in got:
        # Gradients shrink as rows grow: row by row, or small rows alone would be seen.
        one, other = got[part], wanted[part]
        if part != "weight":
            size = other.norm(dim=1, keepdim=True)
            one, other = one / size, other / size
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def compiled_block_case(device, kind, rows, length, width, update) -> None:
    """A block with all kernels traces whole, under autocast where that is bf16."""
    reference = Block(width, 2, 32).to(device)
    fast = Block(width, 2, 32).to(device)
    fast.load_state_dict(reference.state_dict())
    use_kernels(fast)
    rotary = Rotary(32).to(device)
    x, u = torch.randn(2, rows, length, width, device=device).unbind()
    given = [part.requires_grad_() for part in ((x, u) if update else (x,))]

    def loss(stream: Tensor, after: Tensor) -> Tensor:
        return (stream.float() * 0.5 + after.float()).square().sum()

    expected = reference(x, u if update else None, rotary, slice(3, None))
    wanted = torch.autograd.grad(loss(*expected), [*given, *reference.parameters()])
    run = torch.compile(
        fast, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    with torch.autocast(device, kind, enabled=kind != torch.float32):
        out = run(x.to(kind), u.to(kind) if update else None, rotary, slice(3, None))
    got = torch.autograd.grad(loss(*out), [*given, *fast.parameters()])
    limit = 1e-5 if kind == torch.float32 else 2.5e-2
    name = f"compiled block {kind} N{rows} L{length} W{width} update={update}"
    for part, one, other in zip(("stream", "update"), out, expected, strict=True):
        check(f"{name}: {part}", relative_error(one, other), limit)
    names = ["x", "u"][: len(given)] + [name for name, _ in fast.named_parameters()]
    for part, one, other in zip(names, got, wanted, strict=True):
        assert one.dtype == other.dtype
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def use_kernels(block: Block) -> None:
    block.attention.fast, block.fast_mlp = KernelAttention(), KernelMLP()
    block.fast_norm = KernelNorm()


def recomputed_stack_case(device, kind, rows, length, width, keep) -> None:
    """A stack with all kernels hands updates on, and gives the same gradients when recomputed."""
    reference, fast = (Stack(width, 3, 2, 32).to(device) for _ in range(2))
    fast.load_state_dict(reference.state_dict())
    for block in fast.blocks:
        assert isinstance(block, Block)
        use_kernels(block)
    x = torch.randn(rows, length, width, device=device, requires_grad=True)
    expected = reference(x, keep=keep)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *reference.parameters()])
    with torch.autocast(device, kind, enabled=kind != torch.float32):
        out = checkpoint(lambda x: fast(x, keep=keep), x, use_reentrant=False)
    got = torch.autograd.grad((out * weights).sum(), [x, *fast.parameters()])
    limit = 1e-5 if kind == torch.float32 else 2.5e-2
    name = f"recomputed stack {kind} N{rows} L{length} W{width} {keep}"
    check(f"{name}: output", relative_error(out, expected), limit)
    names = ["input", *(name for name, _ in fast.named_parameters())]
    for part, one, other in zip(names, got, wanted, strict=True):
        check(f"{name}: gradient of {part}", relative_error(one, other), limit)


def traced_block_case() -> None:
    """Under autocast a block with all kernels traces whole; gradients are as its parameters."""
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        block, rotary = Block(64, 2, 16), Rotary(16)
        use_kernels(block)
        x, u = (torch.randn(3, 17, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = torch.compile(block, fullgraph=True, backend="aot_eager")(x, u, rotary)
        got = torch.autograd.grad(torch.add(*out).sum(), [x, u, *block.parameters()])
    kinds = [one.dtype for one in (*out, *got)]
    wanted = [torch.bfloat16] * 4 + [torch.float32] * (len(got) - 2)
    check("traced block under autocast", 0.0 if kinds == wanted else torch.nan, 0.0)


def stack_case(device, rows, length, width, layers, heads, head_dim, keep, causal, **path) -> None:
    """A whole stack without autograd, and again after its weights have changed.

    `path` moves row counts at which other kernels take over, to reach them with few rows.
    """
    usual = {key: getattr(inference, key) for key in path}
    for key, value in path.items():
        setattr(inference, key, value)
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
                expected = stack(x, keep=keep, causal=causal, head=end)
                stack.fast = fast
                out = stack(x, keep=keep, causal=causal, head=end)
                stack.fast = None
                check(f"{name}: {change} {part}", relative_error(out, expected), limit)
            for parameter in [*stack.parameters(), *head.parameters()]:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            fast.refresh()
    for key, value in usual.items():
        setattr(inference, key, value)


def rnn_case() -> None:
    """A rollout through graphs and kernels stays with the plain loop under autocast."""
    from memtrain.config import EngineConfig
    from memtrain.train.engine import Engine

    cell = TransformerCell(CellConfig(layers=4), 256)
    rnn = RNN(cell, Decoder(TeacherConfig(), 256, 256)).cuda()
    engine = Engine(EngineConfig(device="cuda"))
    tokens = torch.randint(256, (8, 40), device="cuda")
    chances = torch.rand(20, 8, device="cuda")

    def choose(logits: Tensor, chance: Tensor) -> Tensor:
        return (chance * logits.shape[-1]).long()

    with torch.no_grad(), engine.autocast():
        expected = rnn.unroll(tokens)
        written, memory = rnn.write(expected[:, -1], chances, choose)
        engine.prepare_rnn(rnn)
        out = rnn.unroll(tokens)
        fast_written, fast_memory = rnn.write(expected[:, -1], chances, choose)
    for step in (0, 15, 16, 39):
        check(f"rollout, step {step}", relative_error(out[:, step], expected[:, step]), 5e-2)
    check("written tokens", float((written != fast_written).sum()), 0)
    check("memory after writing", relative_error(fast_memory, memory), 5e-2)


def mlp_cases(device: str, kind: torch.dtype) -> list[Callable[[], None]]:
    shapes = [(5, 16, 64), (70, 48, 208), (130, 64, 256)]
    # Weights that stay in shared memory, and programs that take several turns.
    stays = {"BR": 64, "BO": 64, "BI": 64, "per_processor": 1, "num_stages": 2}
    cases = [partial(mlp_case, device, kind, *shape) for shape in shapes]
    cases.append(partial(mlp_case, device, kind, 300, 48, 80, **stays))
    if device == "cuda":
        shapes = [(rows, 256, 1024) for rows in (17, 2176, 10112, 20001, 69632)]
        cases += [partial(mlp_case, device, kind, *shape) for shape in (*shapes, (999, 384, 1536))]
    if kind == torch.bfloat16:
        stays |= {"BI": 256}
        cases.append(partial(mlp_case, device, kind, 40001, 256, 1024, **stays))
    return cases


def norm_cases(device: str, kind: torch.dtype) -> list[Callable[[], None]]:
    shapes = [(1, 48), (37, 48), (70, 256), (5, 384)]
    if device == "cuda":
        shapes += [(rows, 256) for rows in (17, 2176, 10112, 20001, 69632)] + [(999, 384)]
    cases = [partial(norm_case, device, kind, *shape, True, ("sum", "norm")) for shape in shapes]
    for add, read in ((True, ("norm",)), (True, ("sum",)), (False, ("sum", "norm"))):
        cases.append(partial(norm_case, device, kind, 37, 48, add, read))
    # Programs that take several turns, the last of them beyond the end; loads made turns ahead.
    for stages in (1, 2, 3):
        turns = {"BR": 4, "per_processor": 1, "num_warps": 4, "STAGES": stages}
        shape = (30, 48) if device == "cpu" else (3001, 256)
        cases.append(partial(norm_case, device, kind, *shape, True, ("sum", "norm"), **turns))
    return cases


def all_cases(device: str) -> list[Callable[[], None]]:
    if device == "cpu":
        inference.PRODUCTS = torch.float32
        kinds, shapes = (torch.float32,), [(2, 17), (1, 70), (2, 5)]
        heads = ((2, 16),)
    else:
        kinds = (torch.bfloat16,)  # on a GPU only bf16 takes this path
        shapes = [(3, 17), (2, 79), (4, 272), (5, 16), (1000, 17), (9000, 17)]
        heads = ((8, 64), (2, 32))
    cases: list[Callable[[], None]] = [
        partial(attention_case, device, kind, rows, length, count, size, keep, causal)
        for kind, (rows, length), (count, size), causal in product(
            kinds, shapes, heads, (False, True)
        )
        for keep in (None, slice(-3, None), slice(4))
    ]
    for kind in kinds:
        cases += mlp_cases(device, kind) + norm_cases(device, kind)
    for update in (False, True):
        cases.append(partial(compiled_block_case, device, kinds[0], 3, 17, 32, update))
    cases.append(traced_block_case)
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
        cases.append(rnn_case)
    cases += [partial(stack_case, device, *stack) for stack in stacks]
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
