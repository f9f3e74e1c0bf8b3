"""Models that write, without their teacher and data: those of runs, and small ones that come with
the package.

Of the latter NAME.safetensors holds the weights of cell and readout in 16 bits; NAME.json holds
the run's config, what the tokens spell, how it was trained, and a checksum, which ties the two
together.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from memtrain import __version__
from memtrain.accel.engine import Engine
from memtrain.config import CELLS, RunConfig
from memtrain.config.serialize import from_json, to_json
from memtrain.data.codec import TokenCodec, read_codec
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import parse_json, read_bytes, read_text, sync, write_atomic
from memtrain.models.build import build_rnn
from memtrain.models.rnn import RNN
from memtrain.training.checkpoint import latest_checkpoint, load_weights
from memtrain.training.console import Reporter
from memtrain.training.fingerprint import check_record, describe_cell, read_record
from memtrain.training.run_folder import check_imports, read_folder, whole_run_file

if TYPE_CHECKING:
    from memtrain.training.run import Run

PRETRAINED_VERSION = 1
MAX_CARD_BYTES = 2**20
HOME = Path(__file__).parent / "weights"
"""Where the package's own models are."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that can write, as `generate` takes it."""

    name: str
    rnn: RNN
    spelling: TokenCodec | None
    """What the tokens spell; None if the run's task asks for answers: it cannot generate."""
    config: RunConfig
    """The run that trained it."""
    trained: dict[str, Any]
    """Steps, tokens and seconds of each stage, and whatever the exporter added."""

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.rnn.parameters())
        return f"<Pretrained {self.name}: {size:,} parameters, {self.config.cell.kind} cell>"


def load_rnn(
    folder: Path | str,
    *,
    best: bool = False,
    allow_code: bool = False,
    cell: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Pretrained:
    """The recurrent network of a run. Of its folder, config.json and checkpoints/ are enough.

    Args:
        folder: the run's folder.
        best: take the checkpoint with the lowest held-out loss instead of the newest.
        allow_code: import the cell that the run's config names.
        cell: the cell as an object, if it was given as one: the same, or it is refused.
        reporter: hears of checkpoints that had to be passed over.

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
    if plain != {}:
        spelling = None if plain is None else read_codec(plain, source)
    else:  # written by an older memtrain; only the data knows
        from memtrain.training.run import Run

        spelling = Run.open(folder, allow_code=allow_code, cell=cell).spelling
    vocab_size = spelling.vocab_size if spelling else _vocab_size(weights, source)
    rnn = build_rnn(config, vocab_size, cell)
    record = recorded.made_of if recorded else checkpoint.progress.made_of
    if record is not None:
        given = cell is not None
        found = describe_cell(config, rnn.cell, vocab_size, given=given)
        for doubt in check_record(read_record(record, source), found, str(folder), ("cell",)):
            reporter.say(doubt)
    load_weights(rnn, weights, folder)
    engine = Engine(config.engine)
    engine.apply_globals()
    rnn.to(engine.device).eval()
    engine.prepare(rnn)
    trained = {"stages": checkpoint.progress.stages_json()}
    return Pretrained(config.name, rnn, spelling, config, trained)


def _vocab_size(weights: Mapping[str, torch.Tensor], source: str) -> int:
    """Of a task that asks for answers, which spells nothing."""
    head = weights.get("readout.head.weight")
    if head is None or head.dim() != 2:
        raise MemtrainError(f"{source}: has no readout")
    return len(head)


def pretrained_names(folder: Path | str | None = None) -> list[str]:
    """The models that are there."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in (Path(folder) if folder else HOME).iterdir()
        if entry.name.endswith(".json")
    )


def load_pretrained(
    name: str, *, folder: Path | str | None = None, device: torch.device | str = "cpu"
) -> Pretrained:
    """A model by name, in 32 bits.

    Args:
        name: one of `pretrained_names`.
        folder: where its two files are, if not in the package.
        device: where it is to run.

    Raises:
        MemtrainError: no such model, or its files are not as they were exported.
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
        _check_cell_kind(config, name)
        rnn = build_rnn(config, spelling.vocab_size)
        trained = dict(card["trained"])
        weights = _weights_of(home, name, str(card["sha256"]), rnn)
        load_weights(rnn, load(weights), f"{name}.safetensors")
    except MemtrainError:
        raise
    except FileNotFoundError:
        raise MemtrainError(
            f"{name}.safetensors: its weights are missing; install memtrain again"
        ) from None
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise MemtrainError(f"{name}: damaged ({type(error).__name__}: {reason})") from None
    return Pretrained(name, rnn.to(device).eval(), spelling, config, trained)


def _weights_of(home: Path, name: str, checksum: str, rnn: RNN) -> bytes:
    """The weights that a card's checksum names, of a size that fits the RNN."""
    if not re.fullmatch("[0-9a-f]{64}", checksum):
        raise MemtrainError(f"{name}.json: sha256={checksum!r}: must be 64 hexadecimal digits")
    largest = 8 * sum(value.numel() for value in rnn.state_dict().values()) + 2**20
    # An export that was killed between its two last steps left them under the other name.
    for path in (home / f"{name}.safetensors", home / _waiting_name(name, checksum)):
        if path.is_file():
            weights = read_bytes(path, largest)
            if hashlib.sha256(weights).hexdigest() == checksum:
                return weights
    if not (home / f"{name}.safetensors").exists():
        raise FileNotFoundError
    raise MemtrainError(f"{name}.safetensors: not what was exported (checksum)")


def _waiting_name(name: str, checksum: str) -> str:
    """Of weights whose card is about to be written."""
    return f".{name}-{checksum[:12]}.safetensors"


def export(
    run: "Run",
    name: str,
    folder: Path | str,
    *,
    dtype: Literal["fp16", "bf16"] = "fp16",
    notes: dict[str, Any] | None = None,
) -> list[Path]:
    """Write the RNN of a run as NAME.safetensors and NAME.json; returns the two paths.

    Whenever it is killed or the disk is full, what loads is the old model or the new one.

    Args:
        run: a run whose data can be written, with one of our cells.
        name: letters, digits, '-'.
        folder: where to; both files are replaced.
        dtype: fp16 keeps more digits, bf16 more range; weights need digits.
        notes: more to say of it, for example scores.
    """
    if not name or not all(part.isalnum() for part in name.split("-")):
        raise MemtrainError(f"name={name!r}: letters and digits with '-' between them")
    if dtype not in DTYPES:
        raise MemtrainError(f"dtype={dtype!r}: {did_you_mean(dtype, DTYPES)}")
    if run.spelling is None:
        raise MemtrainError(f"{run.folder}: answers questions and writes nothing")
    if not run.progress.stages:
        raise MemtrainError(f"{run.folder}: is not trained yet")
    _check_cell_kind(run.config, name)
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
    write_atomic(paths[1], (json.dumps(card, indent=1) + "\n").encode())  # from now on the new one
    waiting.replace(paths[0])
    for left in folder.iterdir():  # by exports that were killed
        if re.fullmatch(rf"\.{name}-[0-9a-f]{{12}}\.safetensors", left.name):
            left.unlink()
    sync(folder)
    return paths


def _check_cell_kind(config: RunConfig, name: str) -> None:
    """A pretrained model names no code to import."""
    if config.cell.kind not in CELLS:
        raise MemtrainError(f"{name}: cell.kind={config.cell.kind}: must be {', '.join(CELLS)}")
