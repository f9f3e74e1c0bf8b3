"""Several processes as one: each takes its rows of every batch, and all take the same step.

Start them with torchrun. Every process draws the whole batch from the same generator and keeps
its rows, so a run does not depend on how many there are, up to the order of sums.
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
from memtrain.training.heartbeat import Heartbeat
from memtrain.training.processes import size_of_group, stop_with_parent

BUCKET = 2**24
"""Numbers in one exchange of gradients."""
PATIENCE = timedelta(days=7)
"""How long processes wait for what the main one prepares: data may be large."""
Made = TypeVar("Made")
ForwardHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class Group:
    """The processes of a run. One of them, the main one, writes and speaks."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        """Which of the processes on this machine, and so which of its devices."""
        self.step = 0
        """The step of the run that this process is in."""
        self.exchanges = 0
        """How many exchanges with the others this process has begun."""
        self.heartbeat: Heartbeat | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        if self.size == 1:
            return value
        self.exchanges += 1
        total = value.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Tensor) -> Tensor:
        """The values of all processes, one under another on a new first axis."""
        if self.size == 1:
            return value[None]
        self.exchanges += 1
        everyones = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(everyones, value.contiguous())
        return torch.stack(everyones)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up each process's share of the gradient. What is spread is added up already."""
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
        """The highest of the processes' numbers at each place, on all of them; no GPU is waited
        for."""
        if self.size == 1:
            return list(numbers)
        self.exchanges += 1
        found = torch.tensor(numbers)  # on the host, which gloo serves
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def first(self, number: float) -> float:
        """The main process's number, on all of them; no GPU is waited for."""
        if self.size == 1:
            return number
        self.exchanges += 1
        said = torch.tensor(number, dtype=torch.float64)  # on the host, which gloo serves
        dist.broadcast(said, src=0)
        return float(said)

    def from_main(self, make: Callable[[], Made]) -> Made:
        """What the main process makes, on all of them; the others wait, however long it takes.

        Raises:
            FailedElsewhereError: on the others, when it could not be made.
        """
        if self.size == 1:
            return make()
        self.exchanges += 1
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(patient, dist.ProcessGroup)  # this process is in it
        said: list[Any] = [None, True]  # and whether it failed
        if self.main:
            try:
                said = [make(), False]
            finally:
                dist.broadcast_object_list(said, src=0, group=patient)
            return said[0]
        dist.broadcast_object_list(said, src=0, group=patient)
        if said[1]:
            raise FailedElsewhereError("the main process failed; see what it says")
        return said[0]

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            self.exchanges += 1
            dist.barrier()

    @contextmanager
    def watched(self, saved: Callable[[], str]) -> Iterator[None]:
        """While the processes train together, one that hangs ends the run within a minute.

        Args:
            saved: says what is on disk, for the message.
        """
        if self.heartbeat is None:
            yield
            return
        with self.heartbeat.training(saved):
            yield

    def leave(self) -> None:
        """Part in peace; after an error the process just ends."""
        if self.size > 1:
            self.wait()  # the store may end with the main process
            if self.heartbeat is not None:
                self.heartbeat.close()
            dist.destroy_process_group()

    def shard_teacher_weights(self, teacher: Teacher, device: torch.device) -> None:
        """FSDP2: every process keeps a slice of each weight, and all of them add up gradients."""
        if self.size == 1 or spread(next(teacher.parameters())):
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (self.size,))
        stacks = [teacher.decoder.stack]
        if not isinstance(teacher.encoder, CausalEncoder):  # which reaches into its blocks
            stacks.append(teacher.encoder.stack)
        teacher.fast = None  # it reaches into the decoder's
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
        register_fsdp_forward_method(teacher.decoder, "to_logits")


def _without_views(module: nn.Module, inputs: object, output: Any) -> Any:
    """What a module returns, in memory of its own: a change in place of a view would drop what
    FSDP2 hangs on it, of which torch warns. Linear layers with a bias return views."""
    return tree_map_only(Tensor, lambda t: t if t._base is None else t.clone(), output)


ALONE = Group()


def spread(tensor: Tensor) -> bool:
    """Whether a tensor lies in slices on several processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble tensors that are sharded over processes; all processes must call this."""
    return {name: cast(Any, t).full_tensor() if spread(t) else t for name, t in named.items()}


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, spread as the parameter of its shape is."""
    if not spread(parameter):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def join() -> Group:
    """The group that torchrun started this process in; a group of one without torchrun.

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
        if local_rank >= torch.cuda.device_count():
            raise MemtrainError(
                f"process {local_rank} of this machine has no GPU of its own, there are "
                f"{torch.cuda.device_count()}; start torchrun with --nproc-per-node "
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://")))
    # torchrun's store outlives a failed start, with addresses at which nobody listens any more.
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
    """What to tell when an exchange between processes failed."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    what = f"a process of the run failed or was lost ({reason})"
    return MemtrainError(f"{what}; {last_saved(saved)}")


def last_saved(step: int) -> str:
    """Which checkpoint is the last whole one, in words; -1 if there is none."""
    return f"the last whole checkpoint is step {step}" if step >= 0 else "nothing is saved yet"


def restarts() -> int:
    """How often torchrun has started these processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
