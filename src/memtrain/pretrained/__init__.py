"""Small trained models that come with the package: weights and how they were made.

NAME.safetensors holds the weights of cell and readout in 16 bits, the teacher is left behind.
NAME.json holds the run's config, what the tokens spell, how it was trained, and a checksum.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import cattrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from memtrain.config import CELLS, RunConfig
from memtrain.config_json import from_json, to_json
from memtrain.data.spelling import Spelling
from memtrain.errors import MemtrainError, nearest
from memtrain.nn.build import build_rnn
from memtrain.nn.rnn import RNN
from memtrain.run import Run
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
        spelling = cattrs.Converter(forbid_extra_keys=True).structure(card["spelling"], Spelling)
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
    except cattrs.BaseValidationError as error:
        reason = cattrs.transform_error(error)[0]
        raise MemtrainError(f"{name}.json: spelling: {reason}") from None
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
