"""Checkpoints are written while training goes on.

At the step, the tensors are copied where they lie: a memory copy. A thread brings the copy to the
host and to the disk; on a GPU over a stream of its own, so that steps need not wait for it.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from memtrain.errors import CheckpointError
from memtrain.train.checkpoint import Checkpoint, save_checkpoint
from memtrain.train.files import DISK, Files


class CheckpointWriter:
    """Saves one checkpoint at a time; what goes wrong is raised by the next call."""

    def __init__(self, folder: Path, keep: int, files: Files = DISK) -> None:
        self.folder = folder
        self.keep = keep
        self.files = files
        self.begun = self.saved = -1
        """The numbers of the last checkpoint that was begun, and that is whole on disk."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self, number: int, checkpoint: Checkpoint, first: Callable[[], object] = lambda: None
    ) -> None:
        """Begin to save; the tensors may change as soon as this returns.

        Args:
            number: the checkpoint's number, by which they are in order.
            checkpoint: what to save.
            first: done before the checkpoint can be found, and not in this thread.
        """
        self.wait()
        self.begun = number
        snapshot = _Snapshot(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(number, snapshot, first))
        self._thread.start()

    def _write(self, number: int, snapshot: "_Snapshot", first: Callable[[], object]) -> None:
        try:
            first()
            save_checkpoint(self.folder, number, snapshot.on_host(), self.keep, self.files)
            self.saved = number
        except Exception as error:  # raised in the thread that trains, by check
            self._error = error

    def check(self) -> None:
        """Raise what went wrong with the last checkpoint, if anything did. Does not wait.

        Raises:
            CheckpointError: it could not be written; the message says what is on disk.
        """
        error, self._error = self._error, None
        if error is None:
            return
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.filename or self.folder}: {error.strerror or error}"
        last = f"the last whole one is step {self.saved}" if self.saved >= 0 else "none is new"
        raise CheckpointError(
            f"a checkpoint could not be written ({reason}); {last}; mend that, then resume"
        ) from error

    def wait(self) -> None:
        """Until the last checkpoint is on disk; raises what `check` raises."""
        self.finish()
        self.check()

    def finish(self) -> None:
        """Until nothing is being written, well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Snapshot:
    """A copy of a checkpoint on the device where it lies."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.weights = _clones(checkpoint.weights)
        self.optimizer = _clones(checkpoint.optimizer)
        self.progress = copy.deepcopy(checkpoint.progress)
        devices = {t.device for t in self.weights.values() if t.device.type == "cuda"}
        self.copied = {device: torch.cuda.Event() for device in devices}
        for device, event in self.copied.items():
            event.record(torch.cuda.current_stream(device))

    def on_host(self) -> Checkpoint:
        return Checkpoint(_fetch(self.weights, self), _fetch(self.optimizer, self), self.progress)


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _fetch(tensors: dict[str, Tensor], snapshot: _Snapshot) -> dict[str, Tensor]:
    if not snapshot.copied:
        return {name: tensor.cpu() for name, tensor in tensors.items()}
    fetched = {}
    for device, event in snapshot.copied.items():
        stream = torch.cuda.Stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                if tensor.device == device:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    fetched[name] = host.copy_(tensor, non_blocking=True)
        stream.synchronize()
    return {name: fetched.get(name, tensor) for name, tensor in tensors.items()}
