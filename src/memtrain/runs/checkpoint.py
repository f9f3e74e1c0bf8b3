"""Checkpoints: safetensors and JSON, whole or not there at all.

A checkpoint is a folder `checkpoints/00001234` with weights, optimizer and RNG state, and
`state.json`, which holds a checksum of each file. It is written to a draft folder, synced to disk
and renamed, so a reader never finds half of one, whenever the writer dies. The last few are kept,
and the best: the one with the lowest held-out loss.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from memtrain.errors import CheckpointError, MemtrainError
from memtrain.files import open_new, open_regular, parse_json, read_text, sync
from memtrain.models.cell_state import DTYPES
from memtrain.runs.progress import Best, Progress, read_progress

CHECKPOINT_VERSION = 1
FILES = ("weights.safetensors", "optimizer.safetensors")
MAX_STATE_BYTES = 2**25
"""A text's tokenizer is in the state."""
MAX_HEADER_BYTES = 100 * 2**20
"""The limit of safetensors itself."""
RETRIES = 5
"""Attempts to read checkpoints while a training run replaces them."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
UNREADABLE += (SafetensorError,)
"""Errors of damaged files. torch opens one again by its name: a RuntimeError if it is gone."""
_NAME = re.compile(r"(\d{8,12})(\.old)?")
COMPILED = "_orig_mod."
"""The prefix that torch.compile adds to names of weights."""


class Files:
    """The file operations of a checkpoint, so that tests can make any of them fail.

    Each method is one operation: a crash comes before it, after it or inside.
    """

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)  # without parents: a deleted run folder stays deleted

    def write(self, path: Path, content: bytes) -> None:
        with open_new(path) as file:
            file.write(content)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        """Write safetensors piece by piece; returns the sha256 of the bytes meant to be written.

        The library's own writer holds Python's lock up to 0.7, which stalls training; from 0.8 on
        it makes files that only their owner can read, and hides the errno of a full disk.
        """
        digest = hashlib.sha256()
        with open_new(path) as file:
            for piece in _safetensors_pieces(tensors):
                digest.update(piece)
                file.write(piece)
        return digest.hexdigest()

    def sync(self, path: Path) -> None:
        """Force a file or a folder's entries to disk."""
        sync(path)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link or a folder with its content, if it is there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Files()


def _safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header, one tensor after another."""
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a run needs to continue."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    progress: Progress


def save_checkpoint(
    folder: Path, number: int, checkpoint: Checkpoint, keep: int, files: Files = DISK
) -> Path:
    """Write a checkpoint of host tensors; delete all but the last `keep` and the best."""
    files.make_folder(folder)
    final, draft = folder / f"{number:08d}", folder / f".draft-{number:08d}"
    files.remove(draft)
    files.make_folder(draft)
    digests = {}
    for name, tensors in zip(FILES, (checkpoint.weights, checkpoint.optimizer), strict=True):
        digests[name] = files.write_tensors(draft / name, tensors)
        files.sync(draft / name)
    progress = checkpoint.progress.to_json()
    state = {"version": CHECKPOINT_VERSION, "progress": progress, "sha256": digests}
    state["progress_sha256"] = _digest(progress)
    files.write(draft / "state.json", json.dumps(state, indent=2).encode())
    files.sync(draft / "state.json")
    files.sync(draft)
    if final.exists():  # broken or not, it may be the only one: it stays until the new one is there
        files.remove(folder / f"{final.name}.old")
        files.rename(final, folder / f"{final.name}.old")
    files.rename(draft, final)
    files.sync(folder)
    _drop_old(folder, final, keep, checkpoint.progress.best, files)
    return final


def _drop_old(folder: Path, newest: Path, keep: int, best: Best | None, files: Files) -> None:
    """Delete old checkpoints, and remains of a crash during a save or a deletion."""
    whole = [path for path in numbered(folder) if not path.name.endswith(".old")]
    at = whole.index(newest) + 1
    # Later ones were passed over when the run was opened; they do not count towards `keep`.
    kept = whole[max(0, at - keep) :]
    if best is not None:
        kept.append(folder / f"{best.global_step:08d}")
    for path in sorted(folder.iterdir()):
        if path in kept or not path.is_dir() or path.is_symlink():
            continue
        if _NAME.fullmatch(path.name):
            trash = folder / f".trash-{path.name}"
            files.remove(trash)
            files.rename(path, trash)
            files.remove(trash)
        elif path.name.startswith((".draft-", ".trash-")):
            files.remove(path)


# ----------------------------------------------------------------------------------------- read


def load_checkpoint(path: Path, run: str = "") -> Checkpoint:
    """Read one checkpoint.

    Args:
        path: its folder.
        run: the identity of the run that it must belong to; any if empty.

    Raises:
        CheckpointError: a file is missing, cut short or changed, or it belongs to another run.
    """
    try:
        state = parse_json(read_text(path / "state.json", MAX_STATE_BYTES), "state.json")
        if not isinstance(state, dict) or not isinstance(state.get("sha256"), dict):
            raise CheckpointError("state.json: is not the state of a checkpoint")
        if state.get("version") != CHECKPOINT_VERSION:
            raise CheckpointError(
                f"version {state.get('version')!r}, this memtrain reads {CHECKPOINT_VERSION}; "
                "use the memtrain that wrote it"
            )
        plain = state.get("progress")
        progress = read_progress(plain)
        if state.get("progress_sha256", _digest(plain)) != _digest(plain):
            raise CheckpointError("state.json is not what was written (checksum)")
        if run and progress.run != run:
            raise CheckpointError("belongs to another run")
        for name in FILES:
            if not (path / name).is_file() or (path / name).is_symlink():
                raise CheckpointError(f"{name} is missing")
            if not _has_length_of_header(path / name):
                raise CheckpointError(f"{name} is not as long as its header says")
            if _sha256(path / name) != state["sha256"].get(name):
                raise CheckpointError(f"{name} is not what was written (checksum)")
        weights, optimizer = (load_file(path / name) for name in FILES)
        return Checkpoint(weights, optimizer, progress)
    except MemtrainError as error:
        raise CheckpointError(f"checkpoint {path.name}: {error}") from None
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise CheckpointError(f"checkpoint {path.name}: {reason}") from None


def latest_checkpoint(
    folder: Path, *, best: bool = False, run: str = ""
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and the problems of those after it.

    Args:
        folder: the run's checkpoints.
        best: return the best checkpoint that the newest one names instead.
        run: the identity of the run; checkpoints of another one are passed over.

    Raises:
        CheckpointError: there are checkpoints and none of them is whole, or the best is not.
    """
    for _ in range(RETRIES):
        found = numbered(folder)
        try:
            return _latest(folder, found, best, run)
        except CheckpointError:
            if numbered(folder) == found:
                raise
    return _latest(folder, numbered(folder), best, run)


def _latest(
    folder: Path, found: list[Path], best: bool, run: str
) -> tuple[Checkpoint | None, list[str]]:
    problems = []
    for path in reversed(found):
        try:
            newest = load_checkpoint(path, run)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if best and newest.progress.best is not None:
            number = newest.progress.best.global_step
            return load_checkpoint(folder / f"{number:08d}", run), problems
        return newest, problems
    if problems:
        raise CheckpointError(f"no whole checkpoint in {folder}: " + "; ".join(problems))
    return None, []


def load_weights(models: nn.Module, weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Load a checkpoint's weights into models, all of them.

    Args:
        models: the models.
        weights: tensors by name; modules may have been compiled when they were saved.
        source: where they come from, for errors.

    Raises:
        MemtrainError: they are not these models', or hold values that are not finite.
    """
    own = models.state_dict()
    names = {name.replace(COMPILED, ""): name for name in own}
    weights = {names.get(name.replace(COMPILED, ""), name): w for name, w in weights.items()}
    for name, value in weights.items():
        fresh = own.get(name)
        if not isinstance(fresh, Tensor):
            continue  # load_state_dict names it
        floats = fresh.is_floating_point() and value.is_floating_point()
        if fresh.dtype != value.dtype and not floats:
            raise MemtrainError(
                f"{source}: weights do not fit the config: {name} is {value.dtype}, not "
                f"{fresh.dtype}"
            )
        # A buffer may be infinite by design, such as a mask.
        if not bool(value.isfinite().all()) and bool(fresh.isfinite().all()):
            raise MemtrainError(
                f"{source}: weights hold values that are not finite ({name}); they are damaged, or "
                "their training diverged"
            )
    try:
        models.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:200]
        raise MemtrainError(f"{source}: weights do not fit the config: {reason}") from None


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; a replaced one comes before its successor."""
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    named = [(int(match[1]), match[2] is None, path) for match, path in found if match]
    return [path for *_, path in sorted(named)]


def _digest(progress: Any) -> str:
    return hashlib.sha256(json.dumps(progress, sort_keys=True).encode()).hexdigest()


def _has_length_of_header(path: Path) -> bool:
    """Whether a safetensors file ends with its last tensor: extra bytes would be hashed too."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            return False
        header = parse_json(file.read(size).decode(), path.name)
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        return file.seek(0, 2) == 8 + size + max(ends, default=0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
