"""Models that write, without their teacher and data: those of runs, and small ones that come with
the package.

Of the latter NAME.safetensors holds the weights of cell and readout in 16 bits; NAME.json holds
the run's config, what the tokens spell, how it was trained, and a checksum.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from memtrain.config import CELLS, RunConfig
from memtrain.config_json import from_json, to_json
from memtrain.data.spelling import Spelling, read_spelling
from memtrain.errors import MemtrainError, nearest
from memtrain.nn.build import build_rnn
from memtrain.nn.rnn import RNN
from memtrain.run import Run
from memtrain.run_folder import check_imports, load_weights, read_folder
from memtrain.train.checkpoint import latest_checkpoint
from memtrain.train.engine import Engine
from memtrain.train.reporter import Reporter
from memtrain.version import VERSION

PRETRAINED_VERSION = 1
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that can write, as `generate` takes it."""

    name: str
    rnn: RNN
    spelling: Spelling
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
        cell: the cell as an object, if it was given as one.
        reporter: hears of checkpoints that had to be passed over.

    Raises:
        MemtrainError: the run is not trained yet, has nothing to write, or is damaged.
    """
    folder = Path(folder)
    config = read_folder(folder)
    if not allow_code:
        check_imports(folder, config, cell_given=cell is not None, task_given=True)
    checkpoint, problems = latest_checkpoint(folder / "checkpoints", best=best)
    for problem in problems:
        (reporter or Reporter()).say(f"passed over a broken checkpoint: {problem}")
    if checkpoint is None or not checkpoint.progress.get("stages"):
        raise MemtrainError(f"{folder}: has no checkpoint yet; memtrain resume {folder} trains it")
    if "spelling" in checkpoint.progress:
        plain = checkpoint.progress["spelling"]
        source = f"{folder}: its checkpoint"
        spelling = None if plain is None else read_spelling(plain, source)
    else:  # an older memtrain saved it; the data knows
        spelling = Run.open(folder, allow_code=allow_code, cell=cell).spelling
    if spelling is None:
        raise MemtrainError(
            f"{folder}: its task ({config.data.kind}) asks for answers and has no sequences to "
            "write; try a run of digits"
        )
    rnn = build_rnn(config, spelling.vocab_size, cell)
    weights = {
        key.removeprefix("rnn."): value
        for key, value in checkpoint.weights.items()
        if key.startswith("rnn.")
    }
    load_weights(rnn, weights, folder)
    engine = Engine(config.engine)
    rnn.to(engine.device).eval()
    engine.prepare(rnn)
    engine.prepare_rnn(rnn)
    trained = {"stages": checkpoint.progress["stages"]}
    return Pretrained(config.name, rnn, spelling, config, trained)


def pretrained_names(folder: Path | str | None = None) -> list[str]:
    """The models that are there."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in (Path(folder) if folder else files(__name__)).iterdir()
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
    home = Path(folder) if folder else files(__name__)
    names = pretrained_names(folder)
    if name not in names:
        known = nearest(name, names) if names else "this package holds none"
        raise MemtrainError(f"pretrained model {name!r}: {known}")
    try:
        card = json.loads((home / f"{name}.json").read_text(encoding="utf-8"))
        weights = (home / f"{name}.safetensors").read_bytes()
        if card["version"] != PRETRAINED_VERSION:
            raise MemtrainError(f"{name}.json: version {card['version']}, update memtrain")
        if hashlib.sha256(weights).hexdigest() != card["sha256"]:
            raise MemtrainError(f"{name}.safetensors: not what was exported (checksum)")
        config = from_json(json.dumps(card["config"]))
        spelling = read_spelling(card["spelling"], f"{name}.json")
        _check_cell_kind(config, name)
        rnn = build_rnn(config, spelling.vocab_size)
        rnn.load_state_dict({key: value.float() for key, value in load(weights).items()})
    except MemtrainError:
        raise
    except FileNotFoundError:
        raise MemtrainError(
            f"{name}.safetensors: its weights are missing; install memtrain again"
        ) from None
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise MemtrainError(f"{name}: damaged ({type(error).__name__}: {reason})") from None
    return Pretrained(name, rnn.to(device).eval(), spelling, config, card["trained"])


def export(
    run: Run,
    name: str,
    folder: Path | str,
    *,
    dtype: Literal["fp16", "bf16"] = "fp16",
    notes: dict[str, Any] | None = None,
) -> list[Path]:
    """Write the RNN of a run as NAME.safetensors and NAME.json; returns the two paths.

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
        raise MemtrainError(f"dtype={dtype!r}: {nearest(dtype, DTYPES)}")
    if run.spelling is None:
        raise MemtrainError(f"{run.folder}: answers questions and writes nothing")
    if not run.progress["stages"]:
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
        "memtrain": VERSION,
        "parameters": sum(value.numel() for value in state.values()),
        "dtype": dtype,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "trained": {"stages": run.progress["stages"], **(notes or {})},
        "spelling": asdict(run.spelling),
        "config": json.loads(to_json(run.config)),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.safetensors", folder / f"{name}.json"]
    paths[0].write_bytes(weights)
    paths[1].write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return paths


def _check_cell_kind(config: RunConfig, name: str) -> None:
    """A pretrained model names no code to import."""
    if config.cell.kind not in CELLS:
        raise MemtrainError(f"{name}: cell.kind={config.cell.kind}: must be {', '.join(CELLS)}")
