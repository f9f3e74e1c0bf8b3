"""How a run uses the machine: device, precision, threads, determinism, memory."""

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from memtrain.config import EngineConfig, StageConfig
from memtrain.config.validation import check_device
from memtrain.errors import DeviceMemoryError, MemtrainError
from memtrain.models.layers import Attention, Block, Replaceable
from memtrain.objectives.base import Objective
from memtrain.shapes import Batch, Losses


class Engine:
    """The device, precision and fast paths that an EngineConfig selects.

    With `fast` off, no other module of this package is imported.
    """

    def __init__(self, config: EngineConfig, local_rank: int = 0) -> None:
        self.config = config
        self.device = pick_device(config.device, local_rank)
        self.bf16 = config.precision == "bf16" or (
            config.precision == "auto" and self.device.type == "cuda"
        )
        self.fast = config.fast and self.device.type == "cuda"
        """Whether steps and rollouts are captured as CUDA graphs."""
        self.kernels = False
        """Whether our Triton kernels serve."""
        if self.fast:
            from memtrain.accel.fast_paths import triton_off

            self.kernels = triton_off(self) is None

    def apply_globals(self) -> None:
        """Change the settings of the process that the config asks for, before models are built."""
        if self.config.threads:
            # More threads than cores are not faster, and some machines refuse to create them.
            torch.set_num_threads(min(self.config.threads, os.cpu_count() or 1))
        if self.config.fast and self.device.type == "cpu":
            keep_freed_memory()
        if self.config.deterministic:
            _make_deterministic(self.config.compile)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            # A block is compiled once for each shape: stages, readout, evaluation.
            torch._dynamo.config.recompile_limit = 64

    def autocast(self) -> AbstractContextManager:
        """The precision of the forward pass; weights and optimizer stay in fp32."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """For evaluation: autocast, and no compilation for shapes that are met once."""
        with self.autocast(), self._eager():
            yield

    def _eager(self) -> AbstractContextManager:
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    def prepare(self, models: nn.Module) -> None:
        """Attach the fast paths and compile; one compilation serves all layers."""
        if self.config.fast:
            from memtrain.accel.fast_paths import choose

            choose(models, self)
        if self.config.compile:
            # With kernels, only attention over sequences that are too long for them.
            kind = Attention if self.kernels else Block
            for module in models.modules():
                if isinstance(module, kind):
                    module.compile(dynamic=False)

    @contextmanager
    def reference(self, models: nn.Module) -> Iterator[None]:
        """Take the fast paths off: inside, every operation is PyTorch's own."""
        replaced = [m for m in models.modules() if isinstance(m, Replaceable)]
        fast = [module.fast for module in replaced]
        for module in replaced:
            module.fast = None
        try:
            with self._eager():
                yield
        finally:
            for module, path in zip(replaced, fast, strict=True):
                module.fast = path  # type: ignore[assignment]

    def graph_precision(self) -> AbstractContextManager:
        """Autocast for captured graphs: a cached cast would be stale when the graph is replayed."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False
        )

    def captured_forward(self, objective: Objective) -> Callable[[Batch, torch.Generator], Losses]:
        """The objective as a captured step calls it: on several streams, all weights cast at once.

        Only a captured graph keeps the streams' memory apart.
        """
        from memtrain.accel.cuda_graphs import CastWeights, StreamOverlap

        objective.overlap = StreamOverlap()
        if self.bf16 and objective.applies_once:
            return CastWeights(objective)
        return objective.compute

    def capture(
        self,
        compute: Callable[[], dict[str, Tensor]],
        generator: torch.Generator,
        warm_up: Callable[[], None] | None = None,
    ) -> Callable[[], dict[str, Tensor]]:
        """A training step as a CUDA graph: captured after a few calls, then replayed.

        Args:
            compute: takes one step, all of it on the device.
            generator: the generator that it samples from.
            warm_up: called before the first step.
        """
        from memtrain.accel.cuda_graphs import GraphedStep

        return GraphedStep(compute, generator, warm_up)

    def precompile(self, models: nn.Module, work: Callable[[], object]) -> None:
        """Compile all kernels that some work of these models launches, in parallel.

        The values that it computes are meaningless, and must not be used.
        """
        if not self.kernels:
            return
        from memtrain.accel.fast_paths import graphed_rollouts
        from memtrain.accel.triton.common import precompile

        rollouts = graphed_rollouts(models)
        for rollout in rollouts:
            rollout.precompiling = True
        try:
            with precompile(), self._eager():
                work()
        finally:
            for rollout in rollouts:
                rollout.precompiling = False


WORKSPACES = (":4096:8", ":16:8")
"""The cuBLAS workspaces with which its sums are reproducible, also on several streams."""


def _make_deterministic(compiled: bool) -> None:
    """Make the whole process deterministic. Our own kernels always are: none of them adds in the
    order in which programs end, and their tiles depend on the shapes alone."""
    # cuBLAS reads this when it is first used; torch requires it.
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if given not in WORKSPACES:
        raise MemtrainError(
            f"engine.deterministic with CUBLAS_WORKSPACE_CONFIG={given}: must be "
            f"{' or '.join(WORKSPACES)}, or not set"
        )
    torch.use_deterministic_algorithms(True)
    # Filling memory finds errors and costs time. (The module creates the attribute on access.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if compiled:
        import torch._inductor.config as inductor

        # Otherwise the fastest of several kernels is selected, which may differ between processes.
        inductor.deterministic = True


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Settings of glibc (malloc.h)."""


def keep_freed_memory() -> None:
    """Let the process keep the memory it frees, with glibc: new pages would cost a fault each."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the maximum; larger blocks are returned at once
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that a config names, checked; every process of a machine has its own GPU."""
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
    """The error for a stage that ran out of memory: what it needs, and which option helps."""
    trained = list(trained)
    # Each weight has a gradient and AdamW's two moments.
    fixed = sum(4 * p.numel() * p.element_size() for p in trained) / 2**30
    device = trained[0].device
    known = ""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        known = f", the peak was {peak:.1f} of {total:.1f} GiB"
    rows = stage.batch_size // stage.accumulate
    finer = next((n for n in range(2 * stage.accumulate, 2**20) if stage.batch_size % n == 0), 0)
    remedy = option = "a smaller model is needed"
    if 0 < finer <= stage.batch_size:
        at_a_time = f"takes {stage.batch_size // finer} at a time, the same step"
        remedy = f'changes={{"{name}.accumulate": {finer}}} of Run.open {at_a_time}'
        option = f"--{name}.accumulate {finer} {at_a_time}"
    reason = str(error).splitlines()[0] if str(error) else "out of memory"
    problem = (
        f"{device}: out of memory in {name} with {rows} sequences at a time ({reason}); weights, "
        f"gradients and optimizer need {fixed:.2f} GiB{known}, the rest grows with the sequences"
    )
    return DeviceMemoryError(
        f"{problem}; {remedy}; it goes on from the last checkpoint",
        f"{problem}; {option}; resume goes on from the last checkpoint",
    )
