"""The table of fast paths: what each replaces, on which device, and why it may be off.

A row puts a faster version of a module's computation into the module's attribute `fast`. Without
any row everything still runs, in plain PyTorch: the same numbers up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.accel import hopper
from memtrain.accel.cpu_decoder import VocabProjectedDecoder
from memtrain.accel.cpu_unroll import FusedUnroll
from memtrain.accel.cuda_graphs import GraphedRollouts, RolloutKernels
from memtrain.accel.engine import Engine
from memtrain.accel.gated_unroll import UnrolledGRU, UnrolledLSTM
from memtrain.accel.triton import HEAD_DIMS
from memtrain.models.cells import GRUCell, LSTMCell, TransformerCell
from memtrain.models.layers import Attention, Block, Lookup, Stack
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Choose, Sampler
from memtrain.models.teacher import Decoder, Teacher
from memtrain.shapes import Values

MODELS = ("encoder", "decoder", "cell", "readout")
STEP, ROLLOUTS = ("training step",), ("rollout", "generation")


@dataclass(frozen=True)
class FastPath:
    """One row of the table."""

    name: str
    replaces: type[nn.Module]
    device: str
    """cpu, cuda or any."""
    roles: tuple[str, ...]
    """Where `explain` names it."""
    make: Callable[[Any, Engine], object] | None = None
    """The new value of the module's `fast`. None: the engine, or kernels of the row above, use
    this path on their own."""
    off: Callable[[Any, Engine], str | None] = lambda module, engine: None
    """Why it cannot serve a module, in words; None if it can. Kernels also check every call."""
    precision: str = ""
    """The only precision in which it is used; every call checks it."""
    cell: type[nn.Module] | None = None
    """Of RNNs, only those with exactly this cell."""

    def fits(self, module: nn.Module, engine: Engine) -> bool:
        """Whether the row is about this module on this device."""
        return (
            self.device in ("any", engine.device.type)
            and isinstance(module, self.replaces)
            and (self.cell is None or type(module.cell) is self.cell)
        )

    def why_off(self, module: nn.Module, engine: Engine) -> str | None:
        """Why it does not serve a module in the engine's precision, in words."""
        precision = "bf16" if engine.bf16 else "fp32"
        if self.precision not in ("", precision):
            return f"{precision}; {self.precision} needed"
        return self.off(module, engine)


# ------------------------------------------------------------------------------ why one is off


def triton_off(engine: Engine) -> str | None:
    """Why our Triton kernels are off. They were written for Hopper and only tested there."""
    if not engine.bf16:
        return "fp32; bf16 needed"
    if not hopper.is_hopper(engine.device):
        return f"{torch.cuda.get_device_name(engine.device)} is not a Hopper GPU"
    return None if find_spec("triton") else "Triton is not installed"


def _triton_off(module: nn.Module, engine: Engine) -> str | None:
    return _values_off(module) or triton_off(engine)


def _block_off(block: Block, engine: Engine) -> str | None:
    width = block.mlp_norm.weight.numel()
    aligned = None if width % 16 == 0 else f"width {width}; a multiple of 16 needed"
    return triton_off(engine) or aligned


def _heads_off(module: nn.Module, engine: Engine | None = None) -> str | None:
    sizes = {part.head_dim for part in module.modules() if isinstance(part, Attention)}
    wrong, needed = sorted(sizes.difference(HEAD_DIMS)), " or ".join(map(str, HEAD_DIMS))
    return f"head_dim {wrong[0]}; {needed} needed" if wrong else None


def _values_off(module: nn.Module, engine: Engine | None = None) -> str | None:
    found = isinstance(module, RNN | Teacher) and isinstance(module.space, Values)
    return "reads numbers; tokens needed" if found else None


def _hopper_off(module: nn.Module, engine: Engine) -> str | None:
    for block in module.modules():
        if isinstance(block, Block):
            width, head_dim = block.mlp_norm.weight.numel(), block.attention.head_dim
            if (width, head_dim) != (256, 64):
                return f"width {width}, head_dim {head_dim}; 256 and 64 needed"
    return hopper.why_off(engine.device)


# ----------------------------------------------------------------------------- what replaces it


class RNNLoops:
    """The fast loops of an RNN: `unroller` with or without a gradient, `graphs` without."""

    def __init__(self, cell: nn.Module) -> None:
        self.cell = cell
        self.unroller: FusedUnroll | UnrolledGRU | UnrolledLSTM | None = None
        self.graphs: GraphedRollouts | None = None

    def unroll(self, inputs: Tensor, memory: Tensor) -> Tensor | None:
        if self.graphs is not None and not torch.is_grad_enabled():
            return self.graphs.unroll(inputs, memory)
        if self.unroller is not None and self.unroller.serves(self.cell, memory):
            return self.unroller(self.cell, inputs, memory)
        return None

    def unroll_last(self, inputs: Tensor, memory: Tensor) -> Tensor | None:
        if self.unroller is not None and self.unroller.serves(self.cell, memory):
            return self.unroller(self.cell, inputs, memory)[:, -1]
        return None  # too few steps for a graph

    def write(
        self, memory: Tensor, uniforms: Tensor, choose: Choose
    ) -> tuple[Tensor, Tensor] | None:
        if self.graphs is None or torch.is_grad_enabled():
            return None
        return self.graphs.write(memory, uniforms, choose)


def loops(rnn: RNN, **parts: object) -> RNNLoops:
    """The fast loops of an RNN, made if it has none yet, with these parts replaced."""
    if not isinstance(rnn.fast, RNNLoops):
        rnn.fast = RNNLoops(rnn.cell)
    for name, part in parts.items():
        setattr(rnn.fast, name, part)
    return rnn.fast


def graphed_rollouts(models: nn.Module) -> list[GraphedRollouts]:
    """The rollouts of these models that run as CUDA graphs."""
    rnns = [module.fast for module in models.modules() if isinstance(module, RNN)]
    return [fast.graphs for fast in rnns if isinstance(fast, RNNLoops) and fast.graphs]


def _block_kernels(block: Block, engine: Engine) -> object:
    from memtrain.accel.triton.block import KernelBlock

    return KernelBlock(block)


def _embedding_gradient(lookup: Lookup, engine: Engine) -> object:
    from memtrain.accel.triton.norm import table_gradient

    return table_gradient


def _graphs(rnn: RNN, engine: Engine) -> object:
    return loops(rnn, graphs=GraphedRollouts(rnn, engine.graph_precision))


def _rollout_kernels(rnn: RNN, engine: Engine) -> object:
    graphs = loops(rnn).graphs
    assert graphs is not None
    graphs.kernels, graphs.fast_choice = rollout_kernels(rnn), kernel_sampler
    return rnn.fast


def rollout_kernels(rnn: RNN) -> RolloutKernels:
    """Kernels for the stacks of an RNN, and for its step where no projection is between them."""
    from memtrain.accel.triton.rollout_stack import InferenceStack
    from memtrain.accel.triton.rollout_step import InferenceCell

    heads = {part.stack: part.head for part in rnn.modules() if isinstance(part, Decoder)}
    stacks = {
        module: InferenceStack(module, heads.get(module))
        for module in rnn.modules()
        if isinstance(module, Stack) and not _heads_off(module)
    }
    cells = {
        module: InferenceCell(module.embedding, stacks[module.stack])
        for module in rnn.modules()
        if isinstance(module, TransformerCell)
        and isinstance(module.embedding, nn.Embedding)
        and module.stack in stacks
        and isinstance(module.from_memory, nn.Identity)
        and isinstance(module.to_memory, nn.Identity)
    }
    return RolloutKernels(stacks, cells)


def kernel_sampler(choose: Choose) -> Choose:
    """One kernel that samples the same tokens, if there is one."""
    if not isinstance(choose, Sampler) or not choose.is_plain:
        return choose
    from memtrain.accel.triton.rollout_step import KernelSampler

    return KernelSampler(choose, choose.temperature, choose.allowed)


# --------------------------------------------------------------------------------- the table

FAST_PATHS = (
    FastPath("triton", Block, "cuda", MODELS, _block_kernels, _block_off),
    FastPath("triton attention", Block, "cuda", MODELS, off=_heads_off),
    FastPath("hopper", Block, "cuda", MODELS, off=_hopper_off),
    FastPath("triton", Lookup, "cuda", (), _embedding_gradient, _triton_off),
    FastPath("projected vocabulary (CPU)", Teacher, "cpu", ("decoder",),
             lambda teacher, engine: VocabProjectedDecoder(), _values_off, "fp32"),
    FastPath("CUDA graph", RNN, "cuda", STEP, off=_values_off),
    FastPath("overlapped streams", RNN, "cuda", STEP),
    FastPath("bulk weight cast", RNN, "cuda", STEP, precision="bf16"),
    FastPath("fused unroll (CPU)", RNN, "cpu", ("cell", "rollout"),
             lambda rnn, engine: loops(rnn, unroller=FusedUnroll()),
             precision="fp32", cell=TransformerCell),
    FastPath("whole-sequence GRU", RNN, "any", ("cell",),
             lambda rnn, engine: loops(rnn, unroller=UnrolledGRU()), cell=GRUCell),
    FastPath("whole-sequence LSTM", RNN, "any", ("cell",),
             lambda rnn, engine: loops(rnn, unroller=UnrolledLSTM()), cell=LSTMCell),
    FastPath("CUDA graphs", RNN, "cuda", ROLLOUTS, _graphs, _values_off),
    FastPath("triton", RNN, "cuda", ROLLOUTS, _rollout_kernels, _triton_off),
    FastPath("triton attention", RNN, "cuda", ROLLOUTS, off=_heads_off),
    FastPath("hopper", RNN, "cuda", ROLLOUTS, off=_hopper_off),
)  # fmt: skip
"""In the order in which they are attached: a row may build on those above it."""


def choose(models: nn.Module, engine: Engine) -> None:
    """Attach every fast path that can serve these models here."""
    for path in FAST_PATHS if engine.config.fast else ():
        for module in models.modules():
            if path.make and path.fits(module, engine) and path.off(module, engine) is None:
                module.fast = path.make(module, engine)  # type: ignore[assignment]


# ------------------------------------------------------------------------------------ explain


def explain(models: nn.Module, engine: Engine) -> list[str]:
    """One line per role: the paths that serve it, and why a better one is off.

    Example: "encoder: triton; hopper off: Triton 3.7.0, written for 3.6".
    """
    return [f"{role}: {_explain_role(role, parts, engine)}" for role, parts in _roles(models)]


def summary(models: nn.Module, engine: Engine) -> str:
    """The most important of these lines in one, at most 100 characters."""
    lines = dict(line.split(": ", 1) for line in explain(models, engine))
    model = lines.get("encoder") or lines["cell"]
    return shorten(f"fast paths: {model}; step: {lines['training step']}", 100, placeholder=" ...")


def _roles(models: nn.Module) -> Iterator[tuple[str, Sequence[nn.Module]]]:
    """The roles that these models have, each with the modules that may be replaced for it."""
    teacher = next((m for m in models.modules() if isinstance(m, Teacher)), None)
    rnn = next((m for m in models.modules() if isinstance(m, RNN)), None)
    if teacher is not None:
        yield "encoder", [*teacher.encoder.modules()]
        yield "decoder", [teacher, *teacher.decoder.modules()]
    if rnn is not None:
        yield "cell", [rnn, *rnn.cell.modules()]
        yield "readout", [*rnn.readout.modules()]
        yield from ((role, [rnn]) for role in (*STEP, *ROLLOUTS))


def _explain_role(role: str, parts: Sequence[nn.Module], engine: Engine) -> str:
    if not engine.config.fast:
        return "plain PyTorch; engine.fast is off"
    serving, off = [], ""
    for path in FAST_PATHS:
        module = next((part for part in parts if path.fits(part, engine)), None)
        if module is None or role not in path.roles:
            continue
        if reason := path.why_off(module, engine):
            off = f"; {path.name} off: {reason}"
            break  # what follows builds on it
        if not serving or not path.name.startswith(f"{serving[-1]} "):
            serving.append(path.name)
    compiled = engine.config.compile and any(isinstance(part, Block) for part in parts)
    return (" + ".join(serving) or ("torch.compile" if compiled else "plain PyTorch")) + off
