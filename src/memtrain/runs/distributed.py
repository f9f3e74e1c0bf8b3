"""Several processes as one: each takes its rows of every batch, and all take the same step.

Start them with torchrun. Every process samples the whole batch from the same generator and keeps
its rows, so a run does not depend on the number of processes, up to the order of sums.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.errors import FailedElsewhereError, MemtrainError
from memtrain.models.teacher import CausalEncoder, Teacher
from memtrain.runs.heartbeat import Heartbeat
from memtrain.runs.processes import size_of_group, stop_with_parent

BUCKET = 2**24
"""Numbers per all-reduce of gradients."""
PATIENCE = timedelta(days=7)
"""How long processes wait for the main one's work, such as preparing a large data set."""
Made = TypeVar("Made")
ForwardHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class Group:
    """The processes of a run. The main one writes files and prints."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        """The index among the processes of this machine, and so of the device."""
        self.step = 0
        """The step of the run that this process is in."""
        self.exchanges = 0
        """How many collective calls this process has begun."""
        self.heartbeat: Heartbeat | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size == 1:
            return value
        self.exchanges += 1
        total = value.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Tensor) -> Tensor:
        """The values of all processes, stacked on a new first axis."""
        if self.size == 1:
            return value[None]
        self.exchanges += 1
        everyones = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(everyones, value.contiguous())
        return torch.stack(everyones)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the processes; FSDP2 has summed those of sharded parameters."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for gradient in (p.grad for p in parameters if p.grad is not None and not spread(p)):
            bucket.append(gradient)
            if sum(g.numel() for g in bucket) >= BUCKET:
                self._sum_bucket(bucket)
                bucket = []
        self._sum_bucket(bucket)

    def _sum_bucket(self, gradients: list[Tensor]) -> None:
        if not gradients:
            return
        self.exchanges += 1
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise maximum over all processes; does not wait for a GPU."""
        if self.size == 1:
            return list(numbers)
        self.exchanges += 1
        found = torch.tensor(numbers)  # on the host, which gloo serves
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def first(self, number: float) -> float:
        """The main process's number; does not wait for a GPU."""
        if self.size == 1:
            return number
        self.exchanges += 1
        shared = torch.tensor(number, dtype=torch.float64)  # on the host, which gloo serves
        dist.broadcast(shared, src=0)
        return float(shared)

    def from_main(self, make: Callable[[], Made]) -> Made:
        """Call `make` in the main process and return its result in all; the others wait.

        Raises:
            FailedElsewhereError: in the others, when it raised.
        """
        if self.size == 1:
            return make()
        self.exchanges += 1
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(patient, dist.ProcessGroup)  # this process is in it
        shared: list[Any] = [None, True]  # the result, and whether it failed
        try:
            if self.main:
                shared = [make(), False]
        finally:
            dist.broadcast_object_list(shared, src=0, group=patient)
        if shared[1]:
            raise FailedElsewhereError("the main process failed; see its output")
        return shared[0]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            self.exchanges += 1
            dist.barrier()

    @contextmanager
    def watched(self, saved: Callable[[], str]) -> Iterator[None]:
        """While the processes train together, end the run within a minute if one hangs.

        Args:
            saved: describes what is on disk, for the message.
        """
        if self.heartbeat is None:
            yield
            return
        with self.heartbeat.training(saved):
            yield

    def leave(self) -> None:
        """Destroy the process group, after a run without errors."""
        if self.size > 1:
            self.wait()  # the store may end with the main process
            if self.heartbeat is not None:
                self.heartbeat.close()
            dist.destroy_process_group()

    def shard_teacher_weights(self, teacher: Teacher, device: torch.device) -> None:
        """FSDP2: every process keeps a slice of each weight; gradients are summed."""
        if self.size == 1 or spread(next(teacher.parameters())):
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (self.size,))
        stacks = [teacher.decoder.stack]
        if not isinstance(teacher.encoder, CausalEncoder):  # it accesses weights of its blocks
            stacks.append(teacher.encoder.stack)
        teacher.fast = None  # it accesses weights of the decoder
        units = [block for stack in stacks for block in stack.blocks]
        without_views = cast(ForwardHook, torch.compiler.disable(_without_views))
        for unit in (*units, teacher.encoder, teacher.decoder, teacher):
            unit.register_forward_hook(without_views)  # before FSDP2's own
            fully_shard(unit, mesh=mesh)
            assert isinstance(unit, FSDPModule)  # it is one now
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for method in ("encode", "encode_with_logits", "decode", "predict"):
            register_fsdp_forward_method(teacher, method)
        for method in ("to_logits", "with_head"):
            register_fsdp_forward_method(teacher.decoder, method)


def _without_views(module: nn.Module, inputs: object, output: Any) -> Any:
    """Copy views in a module's output, such as of a Linear with a bias.

    A write in place to a view would drop FSDP2's hooks on it, and torch warns.
    """
    return tree_map_only(Tensor, lambda t: t if t._base is None else t.clone(), output)


ALONE = Group()


def spread(tensor: Tensor) -> bool:
    """Whether a tensor is sharded over several processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble tensors that are sharded over processes; all processes must call this."""
    return {name: cast(Any, t).full_tensor() if spread(t) else t for name, t in named.items()}


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded or laid out in memory as the parameter of its shape is.

    The fused AdamW kernel walks a parameter and its moments in memory order: a contiguous moment of
    a parameter that is not contiguous would be applied to other weights.
    """
    if not spread(parameter):
        return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(value)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def join() -> Group:
    """Join the group that torchrun started this process in; a group of one without torchrun.

    If torchrun is killed, the process stops as after SIGTERM. If a process of the group hangs, all
    of them end (see heartbeat.py).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()
    if size_of_group() == 1:
        return ALONE
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= (gpus := torch.cuda.device_count()):
            raise MemtrainError(
                f"process {local_rank} of this machine has no GPU of its own, there are {gpus}; "
                f"start torchrun with --nproc-per-node {gpus}"
            )
        torch.cuda.set_device(local_rank)
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://")))
    # torchrun's store outlives a failed start and keeps addresses where nobody listens any more.
    attempt = dist.PrefixStore(f"attempt-{restarts()}", store)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    group = Group(rank, size, local_rank)
    client = attempt.clone()  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
    heartbeat = Heartbeat(client, rank, size, lambda: (group.step, group.exchanges))
    heartbeat.announce()  # before the processes meet, so that each finds all of the others
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    heartbeat.start()
    group.heartbeat = heartbeat
    return group


def lost_worker(error: Exception, saved: int) -> MemtrainError:
    """The error for a failed exchange between processes."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return MemtrainError(f"a process of the run failed or was lost ({reason}); {last_saved(saved)}")


def last_saved(step: int) -> str:
    """Describes the last whole checkpoint; -1 if there is none."""
    return f"the last whole checkpoint is step {step}" if step >= 0 else "nothing is saved yet"


def restarts() -> int:
    """How often torchrun has restarted these processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
