"""Write the teacher's memories of sequences to a label file, and start a run from such a file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from memtrain.config import RunConfig
from memtrain.data.label_file import LabelCard, label_writer
from memtrain.data.labels import Labels
from memtrain.data.stream import StreamTask
from memtrain.data.task import Task
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.evaluation.evaluate import EVALUATION_SEED, encode_in_chunks
from memtrain.models.check_cell import memory_shape
from memtrain.models.rnn import RNN
from memtrain.runs.fingerprint import tensors_checksum
from memtrain.shapes import Batch

if TYPE_CHECKING:
    from memtrain.training.run import Run

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CHUNK_FLOATS = 2**24
"""Numbers in the memories that are encoded at once."""


def label_run(
    run: "Run",
    path: Path | str,
    *,
    data: Path | str | None = None,
    sequences: int = 4096,
    held_out: int = 256,
    length: int | None = None,
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, all: None,
) -> Labels:
    """Write the memories that a run's teacher makes of sequences, one per step, to a file.

    Sequences are encoded a few at a time, so memory use does not grow with their number.

    Args:
        run: a run with a trained teacher.
        path: the safetensors file.
        data: other data than the run's: anything that its recipe takes as --data, or for a run of
            a task a .npy of tokens (N, T), which has no targets.
        sequences: training sequences, sampled as in training.
        held_out: sequences for evaluation, from held-out data.
        length: tokens per sequence of a stream; by default its `evaluate_length`.
        dtype: in which memories are stored.
        seed: selects the training sequences.
        report: called with the number of sequences written, and of all.

    Raises:
        MemtrainError: the run has no trained teacher, or an argument is invalid.
    """
    teacher = run.teacher
    if teacher is None or not run.progress.stages:
        why = "has no teacher" if teacher is None else "has no checkpoint yet; train it first"
        raise MemtrainError(f"{run.folder}: {why}; labels are the memories of a trained teacher")
    if run.task.values is not None:
        raise MemtrainError(
            f"{run.folder}: its sequences are numbers, and a label file holds tokens; train the "
            "cell in the run itself (smt, dmt)"
        )
    for name, value in (("sequences", sequences), ("held_out", held_out)):
        if value < 1:
            raise MemtrainError(f"{name}={value}: must be at least 1")
    if dtype not in DTYPES:
        raise MemtrainError(f"dtype={dtype!r}: {did_you_mean(dtype, DTYPES)}")
    task, tokens = run.task, None
    if data is not None and isinstance(task, StreamTask):
        from memtrain.data.prepare.cache import prepared_like

        task = task.on(prepared_like(task.store, Path(data), Path("data")), str(data))
    elif data is not None:
        tokens = read_sequences(Path(data), task.vocab_size)
    if tokens is not None:
        sequences, held_out = _split(len(tokens))
        task_length = tokens.shape[1]
    else:
        task = _with_length(task, length)
        task_length = task.sequence_length
        available = task.held_out(held_out, torch.Generator().manual_seed(EVALUATION_SEED))
        held_out = len(available.inputs)
    shape = (sequences + held_out, task_length)
    memory = memory_shape(run.rnn.cell)
    stored = torch.uint8 if task.vocab_size <= 256 else torch.int32
    shapes = {"inputs": (shape, stored), "memories": ((*shape, *memory), DTYPES[dtype])}
    if tokens is None:
        shapes["targets"] = (shape, torch.int32)
    card = LabelCard(
        vocab_size=task.vocab_size,
        held_out=held_out,
        source={
            "run": run.id,
            "name": run.config.name,
            "step": str(run.progress.global_step),
            "teacher": tensors_checksum(teacher.state_dict()),
            "data": task.identity if tokens is None else tensors_checksum({"inputs": tokens}),
        },
        unit=task.unit,
        spelling=task.spelling,
        teacher=run.config.teacher,
    )
    chunk = max(1, CHUNK_FLOATS // (task_length * memory[0] * memory[1]))
    generator = torch.Generator(task.device).manual_seed(seed)
    decoder = teacher.decoder.state_dict()
    with label_writer(Path(path), card, shapes, decoder) as writer, run.engine.eval_mode():
        done = 0
        while done < shape[0]:
            count = min(chunk, (sequences if done < sequences else shape[0]) - done)
            if tokens is not None:
                inputs = tokens[done : done + count]
                batch = Batch(inputs, inputs)
            elif done < sequences:
                batch = task.sample(count, generator)
            else:
                first = done - sequences
                batch = available.map(lambda one, at=first, n=count: one[at : at + n])
            batch = batch.to(run.engine.device)
            with torch.no_grad():
                memories = encode_in_chunks(teacher, batch.inputs)
            parts = {"inputs": batch.inputs, "memories": memories}
            if tokens is None:
                parts["targets"] = batch.targets
            writer.add(**parts)
            done += count
            report(done, shape[0])
    return Labels.open(path)


def _split(count: int) -> tuple[int, int]:
    """How many sequences of an array are for training, and how many are held out."""
    if count < 2:
        raise MemtrainError("data: at least 2 sequences, one of which is held out")
    held_out = max(1, count // 10)
    return count - held_out, held_out


def _with_length(task: Task, length: int | None) -> Task:
    if length is None:
        return task.windows(task.sequence_length) if task.stream else task
    if length < 2:
        raise MemtrainError(f"length={length}: must be at least 2")
    task = task.windows(length)
    if task.sequence_length != length:
        raise MemtrainError(
            f"length={length}: sequences of this task have {task.sequence_length} tokens; only "
            "streams have any length"
        )
    return task


def read_sequences(path: Path, vocab_size: int) -> Tensor:
    """Read a .npy of tokens, (N, T)."""
    from memtrain.data.store import open_array

    if path.suffix != ".npy":
        raise MemtrainError(f"data={path}: must be a .npy of tokens of shape (N, T) for this run")
    try:
        array = open_array(path)
    except FileNotFoundError:
        raise MemtrainError(f"data={path}: no such file") from None
    except (OSError, ValueError) as error:
        raise MemtrainError(f"data={path}: {error}") from None
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise MemtrainError(
            f"data={path}: must be whole numbers of shape (N, T), not {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = array.min() if array.min() < 0 else array.max()
        raise MemtrainError(f"data={path}: contains {wrong}, outside 0..{vocab_size - 1}")
    return torch.from_numpy(array.astype("int64"))


def start_from_labels(labels: Labels, rnn: RNN, config: RunConfig) -> None:
    """Check that an RNN can learn the labels; its readout starts as the decoder in their file.

    A readout of another shape than the decoder starts from random weights.
    """
    labels.check_cell(config.cell.kind, memory_shape(rnn.cell))
    own = {name: value.shape for name, value in rnn.readout.state_dict().items()}
    theirs = {name: value.shape for name, value in labels.decoder.items()}
    if own == theirs and config.readout_attention == "causal":
        rnn.readout.load_state_dict(labels.decoder)
    elif labels.targets is None:
        raise MemtrainError(
            f"{labels.path}: has no targets and no decoder that fits, so no readout can be had; "
            "give Labels(..., targets=...), or leave teacher.* as the file has it"
        )
    trains = config.smt.steps and config.smt.decode_weight
    trains = trains or (config.dmt.steps and config.dmt.readout_weight) or config.bptt.steps
    if trains and labels.targets is None:
        raise MemtrainError(
            f"{labels.path}: has no targets to train a readout on; set smt.decode_weight=0, "
            "dmt.readout_weight=0 and bptt.steps=0, then the readout stays the teacher's decoder"
        )
