"""How a step runs: device, precision, compilation, threads."""

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from memtrain.accel.causal_cpu import CausalEncoderCPU
from memtrain.accel.causal_gpu import CausalEncoderGPU
from memtrain.accel.cpu_decoder import VocabProjectedDecoder
from memtrain.accel.cpu_unroll import FusedUnroll
from memtrain.accel.cuda_graphs import (
    FastParts,
    GraphedStep,
    GraphedUnroll,
    GraphedWrite,
    StepOwner,
)
from memtrain.accel.gru import UnrolledGRU
from memtrain.accel.hopper import is_hopper
from memtrain.accel.streams import CastWeights, StreamOverlap
from memtrain.config import EngineConfig, StageConfig
from memtrain.config.validation import check_device
from memtrain.errors import DeviceMemoryError, MemtrainError
from memtrain.models.cells import GRUCell, TransformerCell
from memtrain.models.layers import Attention, Block, Lookup, Stack
from memtrain.models.rnn import RNN, Choose, Sampler
from memtrain.models.teacher import CausalEncoder, Decoder, Teacher
from memtrain.objectives.base import NO_OVERLAP, Overlap
from memtrain.shapes import Batch, Losses

FAST: dict[type[nn.Module], tuple[str, ...]] = {
    Block: ("fast",),
    RNN: ("fast_unroll", "fast_write", "whole_unroll"),
    Teacher: ("fast_decode",),
    CausalEncoder: ("fast",),
}
"""Where a model holds what stands in for its reference."""


class Engine:
    """Turns an EngineConfig into what the trainer needs of the machine."""

    def __init__(self, config: EngineConfig, local_rank: int = 0) -> None:
        self.config = config
        self.device = pick_device(config.device, local_rank)
        self.bf16 = config.precision == "bf16" or (
            config.precision == "auto" and self.device.type == "cuda"
        )
        self.fast = config.fast and self.device.type == "cuda"
        self.written_out = config.fast and self.device.type == "cpu"
        self.kernels = self.fast and self.bf16 and _has_kernels(self.device)
        if config.threads:
            # More than there are cores is no faster, and a machine may refuse to make them.
            torch.set_num_threads(min(config.threads, os.cpu_count() or 1))
        if self.written_out:
            keep_freed_memory()
        if config.deterministic:
            _make_deterministic(config.compile)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            # A block is compiled once for each shape it meets: stages, readout, evaluation.
            torch._dynamo.config.recompile_limit = 64

    def autocast(self) -> AbstractContextManager:
        """The precision of the forward pass; weights and optimizer stay in fp32."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """For evaluation: the shapes it meets are not worth compiling for."""
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        with self.autocast(), eager:
            yield

    def prepare(self, models: nn.Module) -> None:
        """Give the Transformers what makes them fast here; one compilation serves all layers."""
        if self.kernels:
            from memtrain.accel.triton.block import KernelBlock
            from memtrain.accel.triton.embedding import table_gradient

            for module in models.modules():
                if isinstance(module, Lookup):
                    module.table_gradient = table_gradient
                if isinstance(module, Block) and KernelBlock.fits(module):
                    module.fast = KernelBlock(module)
        for module in models.modules():
            if isinstance(module, CausalEncoder) and self.fast:
                module.fast = CausalEncoderGPU(compiled=self.config.compile)
            if isinstance(module, CausalEncoder) and self.written_out:
                module.fast = CausalEncoderCPU()
            if isinstance(module, Teacher) and self.written_out:
                module.fast_decode = VocabProjectedDecoder()
        if self.config.compile:
            for module in models.modules():
                # Where there are kernels, attention that is too long for them.
                kind = Attention if self.kernels else Block
                if isinstance(module, kind):
                    module.compile(dynamic=False)

    @contextmanager
    def reference(self, models: nn.Module) -> Iterator[None]:
        """Without what `prepare` and `prepare_rnn` gave them: every operation is torch's own."""
        given: list[tuple[nn.Module, str, object]] = []
        for module in models.modules():
            for kind, names in FAST.items():
                if isinstance(module, kind):
                    given += [(module, name, getattr(module, name)) for name in names]
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        for module, name, _ in given:
            setattr(module, name, None)
        try:
            with eager:
                yield
        finally:
            for module, name, fast in given:
                setattr(module, name, fast)

    def prepare_rnn(self, rnn: RNN) -> None:
        """Roll out through captured graphs where there are any, or as one function: a GRU by its
        library's loop, a Transformer on a CPU."""
        if self.config.fast and isinstance(rnn.cell, GRUCell):
            rnn.whole_unroll = UnrolledGRU()
        elif self.written_out:
            rnn.whole_unroll = FusedUnroll()
        if self.fast:
            parts = self._fast_parts(rnn)
            rnn.fast_unroll = GraphedUnroll(rnn.cell, parts, self._graph_precision)
            rnn.fast_write = GraphedWrite(rnn, parts, self._graph_precision, self._fast_choice)

    def _fast_parts(self, rnn: RNN) -> FastParts:
        if not self.kernels:
            return FastParts({}, {})
        from memtrain.accel.triton.block import fits_heads
        from memtrain.accel.triton_rollout.stack import InferenceStack
        from memtrain.accel.triton_rollout.step import InferenceCell

        heads = {part.stack: part.head for part in rnn.modules() if isinstance(part, Decoder)}
        stacks = {
            module: InferenceStack(module, heads.get(module))
            for module in rnn.modules()
            if isinstance(module, Stack)
            and all(fits_heads(m) for m in module.modules() if isinstance(m, Attention))
        }
        cells = {
            module: InferenceCell(module.embedding, stacks[module.stack])
            for module in rnn.modules()
            if isinstance(module, TransformerCell)
            and module.stack in stacks
            and isinstance(module.from_memory, nn.Identity)
            and isinstance(module.to_memory, nn.Identity)
        }
        return FastParts(stacks, cells)

    def _fast_choice(self, choose: Choose) -> Choose:
        """The one kernel that chooses the same tokens, where there is one."""
        if not self.kernels or not isinstance(choose, Sampler) or not choose.is_plain:
            return choose
        from memtrain.accel.triton_rollout.step import KernelSampler

        return KernelSampler(choose, choose.temperature, choose.allowed)

    def _graph_precision(self) -> AbstractContextManager:
        """A cast that autocast keeps would be stale when the graph is replayed."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False
        )

    def overlap(self, trainer: "StepOwner") -> Overlap:
        """A captured graph keeps streams apart; without one, memory would have to be watched."""
        return StreamOverlap() if self.fast and trainer.capturable else NO_OVERLAP

    def objective(self, trainer: "StepOwner") -> Callable[[Batch, torch.Generator], Losses]:
        """How the trainer's objective is called: as it is, or on copies of its matrices."""
        if self.fast and self.bf16 and trainer.capturable and trainer.objective.applies_once:
            return CastWeights(trainer.objective)
        return trainer.objective

    def step(self, trainer: "StepOwner") -> Callable[[], dict[str, Tensor]]:
        """How the trainer's step is called: as it is, or as a captured graph of it."""
        if self.fast and trainer.capturable:
            return GraphedStep(trainer, self._rehearse)
        return trainer.compute

    def _rehearse(self, trainer: "StepOwner") -> None:
        """Have all kernels compiled at once, while torch compiles what lies between them."""
        if trainer.objective.short_step:
            self.rehearse(trainer.objective, trainer.rehearse)

    def rehearse(self, models: nn.Module, work: Callable[[], object]) -> None:
        """Have all kernels compiled that some work of these models will launch, if there are any.

        What it computes on the way is meaningless; it must not matter.
        """
        if not self.kernels:
            return
        from memtrain.accel.triton.precompile import rehearsal

        rollouts = [
            module.fast_unroll
            for module in models.modules()
            if isinstance(module, RNN) and isinstance(module.fast_unroll, GraphedUnroll)
        ]
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        for rollout in rollouts:
            rollout.rehearsing = True
        try:
            with rehearsal(), eager:
                work()
        finally:
            for rollout in rollouts:
                rollout.rehearsing = False


WORKSPACES = (":4096:8", ":16:8")
"""With which cuBLAS gives the same sums each time, also on several streams."""


def _make_deterministic(compiled: bool) -> None:
    """From now on, for the whole process. Our own kernels need nothing: none of them adds up in the
    order in which programs happen to end, and their tiles follow from the shapes alone."""
    # cuBLAS reads this when it is first used; torch refuses to go on without it.
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if given not in WORKSPACES:
        raise MemtrainError(
            f"engine.deterministic with CUBLAS_WORKSPACE_CONFIG={given}: must be "
            f"{' or '.join(WORKSPACES)}, or not set"
        )
    torch.use_deterministic_algorithms(True)
    # It finds errors and costs time. (The module makes the attribute when it is asked for.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if compiled:
        import torch._inductor.config as inductor

        # Else the fastest of several kernels is taken, and another process may find another.
        inductor.deterministic = True


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's names for its settings (malloc.h)."""
LARGEST_BLOCK = 2**25
"""Larger ones still go back at once; glibc allows no more."""


def keep_freed_memory() -> None:
    """From now on, for the whole process, with glibc; other libraries have habits of their own."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _has_kernels(device: torch.device) -> bool:
    """Our kernels are made for Hopper's shared memory and were only checked there; other GPUs take
    what torch has."""
    return find_spec("triton") is not None and is_hopper(device)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device a config names, if this machine has it; each process has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_rank:
        name = f"cuda:{local_rank}"
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MemtrainError(f"device={name}: torch sees no CUDA device here; use cpu or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise MemtrainError("device=mps: torch sees no Apple GPU here; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MemtrainError(f"device={name}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def out_of_memory(
    error: Exception, name: str, stage: StageConfig, trained: Iterable[nn.Parameter]
) -> DeviceMemoryError:
    """Which knob to turn, and what is needed whatever it says."""
    trained = list(trained)
    # Weight, gradient and AdamW's two moments of each number.
    fixed = sum(4 * p.numel() * p.element_size() for p in trained) / 2**30
    device = trained[0].device
    known = ""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        known = f", the peak was {peak:.1f} of {total:.1f} GiB"
    rows = stage.batch_size // stage.accumulate
    finer = next((n for n in range(2 * stage.accumulate, 2**20) if stage.batch_size % n == 0), 0)
    remedy = (
        f"--{name}.accumulate {finer} takes {stage.batch_size // finer} at a time, the same step"
        if 0 < finer <= stage.batch_size
        else "a smaller model is needed"
    )
    told = str(error).splitlines()[0] if str(error) else "out of memory"
    return DeviceMemoryError(
        f"{device}: out of memory in {name} with {rows} sequences at a time ({told}); weights, "
        f"gradients and optimizer need {fixed:.2f} GiB{known}, the rest grows with the sequences; "
        f"{remedy}; resume goes on from the last checkpoint"
    )
