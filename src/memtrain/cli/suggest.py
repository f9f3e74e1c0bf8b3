"""What a person probably meant, and how to call memtrain from here."""

import shlex
import shutil
import sys
from difflib import SequenceMatcher
from pathlib import Path

from memtrain.errors import MemtrainError

NEAR = 0.75
"""How alike a name has to be to be suggested: a wrong suggestion is worse than none."""
SYNONYMS = {
    **dict.fromkeys(("lr", "rate"), "learning-rate"),
    **dict.fromkeys(("epochs", "epoch", "iterations", "iters", "max-steps"), "steps"),
    **dict.fromkeys(("batch", "bs"), "batch-size"),
    **dict.fromkeys(("hidden", "hidden-size", "hidden-dim", "d-model"), "width"),
    **dict.fromkeys(("depth", "num-layers", "n-layers"), "layers"),
    **dict.fromkeys(("num-heads", "n-heads"), "heads"),
    **dict.fromkeys(("block-size", "context"), "context-length"),
    **dict.fromkeys(("dataset", "data-dir", "d", "input"), "data"),
    **dict.fromkeys(("gpu", "cuda"), "device"),
    **dict.fromkeys(("output", "output-dir", "out-dir", "run-dir"), "folder"),
    "wd": "weight-decay",
    "num-threads": "threads",
}
"""What options are called elsewhere, and here."""
REMEDIES = {
    "config": "a config.json stands where the recipe does: memtrain train config.json",
}
"""What to do instead of an option that many programs have."""


def nearest_option(option: str, known: list[str]) -> str:
    """The option that was probably meant; "" unless one is really near.

    Args:
        option: what was given, for example --lr or --smt.lr.
        known: all options, those that matter most first.
    """
    group, _, leaf = option.lstrip("-").lower().replace("_", "-").rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)
    same = [name for name in known if name.lstrip("-").rpartition(".")[2] == leaf]
    if group:
        same = [name for name in same if name == f"--{group}.{leaf}"]
    if same:
        return same[0]
    # A group that is right must not make up for a leaf that is wrong.
    near = {name: _likeness(group, leaf, name.lstrip("-")) for name in known}
    best = max(near, key=lambda name: near[name], default="")
    return best if best and near[best] >= NEAR else ""


def _likeness(group: str, leaf: str, name: str) -> float:
    other_group, _, other_leaf = name.rpartition(".")
    likeness = SequenceMatcher(None, leaf, other_leaf).ratio()
    if group:
        likeness = min(likeness, SequenceMatcher(None, group, other_group).ratio())
    return likeness


def command_name() -> str:
    """How to call memtrain again from here: as it is found, or with the path it was started by.

    A fresh clone has it in .venv/bin, which is not on the path until it is activated.
    """
    if shutil.which("memtrain"):
        return "memtrain"
    beside = Path(sys.executable).with_name("memtrain")
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m memtrain"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def refuse_name_of_run(folder: Path) -> None:
    """Refuse the bare name of a run that is in runs/."""
    there = Path("runs") / folder
    if not folder.exists() and (there / "config.json").is_file():
        raise MemtrainError(f"{folder}: no run there; did you mean {there}?")
