"""Load and export the RNN of a run without its teacher and data; load the bundled models.

An exported model is two files: NAME.safetensors has the weights of cell and readout in 16 bits,
NAME.json the config, the token codec, the training record, and the checksum of the weights.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from memtrain import __version__
from memtrain.accel.engine import Engine
from memtrain.config import CELLS, TORCH_CELLS, EngineConfig, RunConfig
from memtrain.config.serialize import from_json, structure, to_json
from memtrain.data.codec import TokenCodec, read_codec
from memtrain.data.series_format import SeriesFormat
from memtrain.errors import MemtrainError, describe_error, did_you_mean
from memtrain.files import parse_json, read_bytes, read_text, sync, write_atomic
from memtrain.models.build import build_rnn
from memtrain.models.rnn import RNN
from memtrain.models.teacher import count_parameters
from memtrain.runs.checkpoint import latest_checkpoint, load_weights
from memtrain.runs.fingerprint import check_record, describe_cell, read_record
from memtrain.runs.run_folder import check_imports, is_run, read_folder, whole_run_file
from memtrain.shapes import Values
from memtrain.training.console import Reporter

if TYPE_CHECKING:
    from memtrain.training.run import Run

PRETRAINED_VERSION = 1
MAX_CARD_BYTES = 2**25
"""A text's tokenizer is in the card."""
HOME = Path(__file__).parent / "weights"
"""Folder of the bundled models."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Pretrained(RNN):
    """An RNN without its teacher and data, ready for `generate`, and what is known of it."""

    def __init__(
        self,
        name: str,
        rnn: RNN,
        spelling: TokenCodec | None,
        config: RunConfig,
        trained: dict[str, Any],
        series: SeriesFormat | None = None,
    ) -> None:
        """
        Args:
            name: the run's or the exported model's.
            rnn: whose cell and readout it takes.
            spelling: the token codec; None if the task asks for answers, and there is nothing to
                sample.
            config: of the run that trained it.
            trained: steps, tokens and seconds of each stage, and the notes of `export`.
            series: names, scale and season of the numbers, if it was trained on a series.
        """
        super().__init__(rnn.cell, rnn.readout)
        self.train(rnn.training)
        self.name, self.spelling, self.config, self.trained = name, spelling, config, trained
        self.series = series

    @property
    def rnn(self) -> RNN:
        """Itself."""
        return self

    def __repr__(self) -> str:
        size = count_parameters(self)
        return f"<Pretrained {self.name}: {size:,} parameters, {self.config.cell.kind} cell>"


def load_rnn(
    folder: Path | str,
    *,
    best: bool = False,
    allow_code: bool = False,
    cell: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Pretrained:
    """Load the RNN of a run, for which config.json and checkpoints/ are enough.

    It is a `memtrain.RNN`: `load_rnn(folder)(tokens)` gives logits. That of a series has their
    format, `load_rnn(folder).series`: columns, scale and season.

    Args:
        folder: the run folder.
        best: load the checkpoint with the lowest held-out loss instead of the newest.
        allow_code: import the cell class that the run's config names.
        cell: the cell as an object, if the run was created with one; it must be the same.
        reporter: receives messages about unreadable checkpoints.

    Raises:
        MemtrainError: the run is not trained yet, is damaged, or has another cell.
    """
    folder = Path(folder)
    config = read_folder(folder)
    if not allow_code:
        check_imports(folder, config, cell_given=cell is not None, task_given=True)
    recorded = whole_run_file(folder)
    checkpoint, problems = latest_checkpoint(
        folder / "checkpoints", best=best, run=recorded.id if recorded else ""
    )
    reporter = reporter or Reporter()
    for problem in problems:
        reporter.say(f"passed over a checkpoint: {problem}")
    if checkpoint is None or not checkpoint.progress.stages:
        raise MemtrainError(f"{folder}: has no checkpoint yet; memtrain resume {folder} trains it")
    source = f"{folder}: its checkpoint"
    weights = {
        key.removeprefix("rnn."): value
        for key, value in checkpoint.weights.items()
        if key.startswith("rnn.")
    }
    plain = checkpoint.progress.spelling
    if plain == "unknown":  # written by an older memtrain; only the data knows
        from memtrain.training.run import Run

        spelling = Run.open(folder, allow_code=allow_code, cell=cell).spelling
    else:
        spelling = None if plain is None else read_codec(plain, source)
    head = weights.get("readout.head.weight")
    if head is None or head.dim() != 2:
        raise MemtrainError(f"{source}: has no readout")
    space = spelling.vocab_size if spelling else len(head)
    progress = checkpoint.progress
    if progress.values is not None:
        space = structure(progress.values, Values, f"{source}: values")
    series = None
    if progress.series is not None:
        series = structure(progress.series, SeriesFormat, f"{source}: series")
    rnn = build_rnn(config, space, cell)
    record = recorded.made_of if recorded else checkpoint.progress.made_of
    if record is not None:
        found = describe_cell(config, rnn.cell, space, given=cell is not None)
        for doubt in check_record(read_record(record, source), found, str(folder), ("cell",)):
            reporter.say(doubt)
    load_weights(rnn, weights, folder)
    engine = Engine(config.engine)
    engine.apply_globals()
    trained = {"stages": checkpoint.progress.stages_json()}
    model = Pretrained(config.name, rnn, spelling, config, trained, series)
    model = model.to(engine.device).eval()
    engine.prepare(model)
    return model


def open_model(
    name: str,
    *,
    best: bool = False,
    allow_code: bool = False,
    reporter: Reporter | None = None,
    device: torch.device | str | None = None,
) -> Pretrained:
    """The RNN of the run in a folder of that name, else the pretrained model of that name.

    Args:
        name: a run folder, the name of one in runs/, or one of `pretrained_names`.
        best, allow_code, reporter: see `load_rnn`.
        device: of the model (default: that of the run's config; for a pretrained model a GPU, if
            there is one).

    Raises:
        MemtrainError: there is neither, or it cannot be loaded.
    """
    names = pretrained_names()
    if not is_run(name) and name in names:
        return load_pretrained(name, device=device or Engine(EngineConfig()).device)
    if not is_run(name) and not is_run(Path("runs") / name):
        known = f"the pretrained models are {', '.join(names)}" if names else "none is installed"
        raise MemtrainError(f"{name}: no run there, and no pretrained model of that name; {known}")
    model = load_rnn(name, best=best, allow_code=allow_code, reporter=reporter)
    return model if device is None else model.to(device)


def pretrained_names(folder: Path | str | None = None) -> list[str]:
    """The names of the bundled models, or of those in a folder."""
    return sorted(path.stem for path in (Path(folder) if folder else HOME).glob("*.json"))


def load_pretrained(
    name: str,
    *,
    folder: Path | str | None = None,
    device: torch.device | str = "cpu",
    allow_code: bool = False,
) -> Pretrained:
    """Load an exported model, in 32 bits.

    Args:
        name: one of `pretrained_names`.
        folder: the folder of its two files, unless it is bundled.
        device: the device to load it to.
        allow_code: import the cell class that its config names.

    Raises:
        MemtrainError: there is no such model, or its files have changed since the export.
    """
    home = Path(folder) if folder else HOME
    names = pretrained_names(folder)
    if name not in names:
        known = did_you_mean(name, names) if names else "this package holds none"
        raise MemtrainError(f"pretrained model {name!r}: {known}")
    try:
        card = parse_json(read_text(home / f"{name}.json", MAX_CARD_BYTES), f"{name}: damaged")
        if card["version"] != PRETRAINED_VERSION:
            raise MemtrainError(f"{name}.json: version {card['version']}, update memtrain")
        config = from_json(json.dumps(card["config"]))
        spelling = read_codec(card["spelling"], f"{name}.json")
        if config.cell.kind not in (*CELLS, *TORCH_CELLS) and not allow_code:
            raise MemtrainError(
                f"{name}: imports its cell, {config.cell.kind}; allow_code=True if you trust it"
            )
        rnn = build_rnn(config, spelling.vocab_size)
        trained = dict(card["trained"])
        weights = _weights_of(home, name, str(card["sha256"]), rnn)
        load_weights(rnn, load(weights), f"{name}.safetensors")
    except MemtrainError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise MemtrainError(f"{name}: damaged ({describe_error(error)})") from None
    return Pretrained(name, rnn.to(device).eval(), spelling, config, trained)


def _weights_of(home: Path, name: str, checksum: str, rnn: RNN) -> bytes:
    """The weights with a checksum, if their size fits the RNN."""
    if not re.fullmatch("[0-9a-f]{64}", checksum):
        raise MemtrainError(f"{name}.json: sha256={checksum!r}: must be 64 hexadecimal digits")
    largest = 8 * sum(value.numel() for value in rnn.state_dict().values()) + 2**20
    # If an export was killed before its last step, they are under the temporary name.
    for path in (home / f"{name}.safetensors", home / _waiting_name(name, checksum)):
        if path.is_file():
            weights = read_bytes(path, largest)
            if hashlib.sha256(weights).hexdigest() == checksum:
                return weights
    if not (home / f"{name}.safetensors").exists():
        raise MemtrainError(f"{name}.safetensors: its weights are missing; install memtrain again")
    raise MemtrainError(f"{name}.safetensors: not what was exported (checksum)")


def _waiting_name(name: str, checksum: str) -> str:
    """The temporary name of weights whose card is not written yet."""
    return f".{name}-{checksum[:12]}.safetensors"


def export(
    run: "Run",
    name: str,
    folder: Path | str,
    *,
    dtype: Literal["fp16", "bf16"] = "fp16",
    notes: dict[str, Any] | None = None,
) -> list[Path]:
    """Save the RNN of a run as NAME.safetensors and NAME.json; returns the two paths.

    If it is killed or the disk is full, the old model or the new one loads, never a mixture.

    Args:
        run: a trained run whose config names its cell, and whose task has sequences to sample.
        name: letters, digits, '-'.
        folder: the folder, in which both files are replaced.
        dtype: fp16 has more digits, which weights need; bf16 has more range.
        notes: extra entries of the training record, for example scores.
    """
    if not name or not all(part.isalnum() for part in name.split("-")):
        raise MemtrainError(f"name={name!r}: letters and digits with '-' between them")
    if dtype not in DTYPES:
        raise MemtrainError(f"dtype={dtype!r}: {did_you_mean(dtype, DTYPES)}")
    if run.task.values is not None:
        raise MemtrainError(
            f"{run.folder}: is of numbers, and only networks of tokens are exported; "
            f"memtrain.load_rnn({str(run.folder)!r}) loads it"
        )
    if run.spelling is None:
        raise MemtrainError(f"{run.folder}: its task asks for answers; it writes nothing to export")
    if not run.progress.stages:
        raise MemtrainError(f"{run.folder}: is not trained yet")
    if run.made_of.get("cell", {}).get("given"):
        raise MemtrainError(
            f"{name}: the cell of {run.folder} was given as an object, which cannot be exported; "
            "name its class in the config, cell.kind=package.module:Class"
        )
    state = {
        key: value.detach().to("cpu", DTYPES[dtype]).contiguous()
        for key, value in run.rnn.state_dict().items()
    }
    weights = save(state, {"format": "pt", "name": name})
    card = {
        "version": PRETRAINED_VERSION,
        "name": name,
        "memtrain": __version__,
        "parameters": sum(value.numel() for value in state.values()),
        "dtype": dtype,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "trained": {"stages": run.progress.stages_json(), **(notes or {})},
        "spelling": asdict(run.spelling),
        "config": json.loads(to_json(run.config)),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.safetensors", folder / f"{name}.json"]
    waiting = folder / _waiting_name(name, card["sha256"])
    write_atomic(waiting, weights)
    # From here on the new model loads.
    write_atomic(paths[1], (json.dumps(card, indent=1) + "\n").encode())
    waiting.replace(paths[0])
    for left in folder.iterdir():  # leftovers of killed exports
        if re.fullmatch(rf"\.{name}-[0-9a-f]{{12}}\.safetensors", left.name):
            left.unlink()
    sync(folder)
    return paths
