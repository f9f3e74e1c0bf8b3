"""Write checkpoints while training continues.

At the step, the tensors are copied on their device: a memory copy. A thread brings the copy to the
host and to the disk; on a GPU over a stream of its own, so that steps do not wait for it.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from memtrain.errors import CheckpointError
from memtrain.runs.checkpoint import DISK, Checkpoint, Files, numbered, save_checkpoint

PIECE = 2**24
"""Bytes per copy from a device to the host."""


class CheckpointWriter:
    """Saves one checkpoint at a time; its errors are raised by the next call."""

    def __init__(self, folder: Path, keep: int, files: Files = DISK) -> None:
        self.folder = folder
        self.keep = keep
        self.files = files
        self.guard: Callable[[], object] = lambda: None
        """Called before each checkpoint; raises if the folder belongs to another run by now."""
        self.begun = self.saved = -1
        """The numbers of the last checkpoint that was begun, by whichever process writes, and of
        the last that this process knows to be whole on disk."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self, number: int, checkpoint: Checkpoint, first: Callable[[], object] = lambda: None
    ) -> None:
        """Begin to save; the tensors may change as soon as this returns.

        Args:
            number: the checkpoint's number, which orders them.
            checkpoint: what to save.
            first: called in the writing thread before the checkpoint becomes visible.
        """
        self.wait()
        self.guard()
        self.begun = number
        snapshot = _Snapshot(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(number, snapshot, first))
        self._thread.start()

    def _write(self, number: int, snapshot: "_Snapshot", first: Callable[[], object]) -> None:
        try:
            first()
            save_checkpoint(self.folder, number, snapshot.on_host(), self.keep, self.files)
            self.saved = number
        except Exception as error:  # `check` raises it in the training thread
            self._error = error

    def leave_to_another(self, number: int) -> None:
        """Note that another process of the run begins to save this one."""
        self.begun = number

    def last_whole(self) -> int:
        """The number of the last checkpoint that is whole on disk, whoever wrote it; else -1."""
        self.finish()
        names = [path.name for path in numbered(self.folder)]
        found = [int(name) for name in names if name.isdecimal()]
        # Later ones were passed over when the run was opened: they are broken.
        return max([self.saved, *(number for number in found if number <= self.begun)])

    def check(self) -> None:
        """Raise the error of the last checkpoint, if there was one. Does not wait.

        Raises:
            CheckpointError: it could not be written; the message names what is on disk.
        """
        error, self._error = self._error, None
        if error is None:
            return
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.filename or self.folder}: {error.strerror or error}"
        last = f"the last whole one is step {self.saved}" if self.saved >= 0 else "none is new"
        raise CheckpointError(
            f"a checkpoint could not be written ({reason}); {last}; fix that, then resume"
        ) from error

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raises as `check` does."""
        self.finish()
        self.check()

    def finish(self) -> None:
        """Wait until nothing is being written, without raising."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Snapshot:
    """A copy of a checkpoint on its devices."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        kinds = {"weights": checkpoint.weights, "optimizer": checkpoint.optimizer}
        named = {(kind, name): t for kind, tensors in kinds.items() for name, t in tensors.items()}
        self.names = list(named)
        self.progress = copy.deepcopy(checkpoint.progress)
        self.packs = [
            _Pack({name: t.detach() for name, t in named.items() if (t.device, t.dtype) == kind})
            for kind in {(tensor.device, tensor.dtype) for tensor in named.values()}
        ]

    def on_host(self) -> Checkpoint:
        """The checkpoint in host memory; frees the memory on the devices."""
        found = {name: tensor for pack in self.packs for name, tensor in pack.on_host().items()}
        self.packs.clear()
        weights, optimizer = (
            {name: found[kind, name] for kind, name in self.names if kind == chosen}
            for chosen in ("weights", "optimizer")
        )
        return Checkpoint(weights, optimizer, self.progress)


class _Pack:
    """All tensors of one device and dtype in one flat tensor.

    Hundreds of tensors are copied by few kernels and fetched by few copies: a step waits neither
    for the launches nor for a thread that holds Python's lock.
    """

    def __init__(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.row = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        self.copied = torch.cuda.Event() if self.row.device.type == "cuda" else None
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.row.device))

    def on_host(self) -> dict[tuple[str, str], Tensor]:
        row = self.row if self.copied is None else self._fetch(self.copied)
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    def _fetch(self, copied: torch.cuda.Event) -> Tensor:
        """Copy over a separate stream, in pieces: pinning host memory for all would stall it."""
        source = self.row.view(torch.uint8)
        host = torch.empty(len(source), dtype=torch.uint8)
        pinned = torch.empty(min(PIECE, len(host)), dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(self.row.device)
        stream.wait_event(copied)
        with torch.cuda.stream(stream):
            for piece, target in zip(source.split(PIECE), host.split(PIECE), strict=True):
                there = pinned[: len(piece)].copy_(piece, non_blocking=True)
                stream.synchronize()
                target.copy_(there)
        return host.view(self.row.dtype)
