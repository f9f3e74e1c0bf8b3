"""From arguments to options, with errors in one line."""

import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from memtrain.errors import MemtrainError

Parsed = TypeVar("Parsed")
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


def parse(kind: type[Parsed], arguments: list[str], program: str) -> Parsed:
    """Parse with tyro; its boxed errors become one line, unknown options get the nearest name."""
    import tyro

    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]  # tyro leaves out of the help what it has read already
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _flowing_help():
            parsed, unknown = tyro.cli(
                kind,
                args=arguments,
                prog=program,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())  # coloured on a terminal
        lines = [line.strip("│╭╮╰╯─ ") for line in plain.splitlines()]
        told = [line for line in lines if line and not line.startswith(("---", "For full"))]
        ending = next((i for i, line in enumerate(told) if line.startswith("Argument help")), None)
        message = _plainly(" ".join(told[1:ending]), program)
        _refuse_unknown(arguments, _option_names(kind), program)  # else it is taken for a value
        raise MemtrainError(f"{message}; see {program} --help") from None
    known = _option_names(kind, parsed)
    _refuse_twice(arguments, known)
    if unknown and not unknown[0].startswith("-"):
        data = "--data" in known and peek(arguments, "--data") is None
        hint = f"did you mean --data {unknown[0]}?" if data else f"see {program} --help"
        raise MemtrainError(f"{unknown[0]!r}: unexpected argument; {hint}")
    if unknown:
        raise _no_such_option(unknown[0], known, program)
    return replace(parsed, **_expanded(parsed))  # type: ignore[type-var]


def _refuse_unknown(arguments: list[str], known: list[str], program: str) -> None:
    """Refuse the first option that there is not."""
    for one in arguments:
        name = one.partition("=")[0].replace("_", "-")
        plain = name.replace("--no-", "--").replace(".no-", ".")
        if name.startswith("--") and name not in known and plain not in known:
            raise _no_such_option(one, known, program)


def _no_such_option(given: str, known: list[str], program: str) -> MemtrainError:
    option = given.partition("=")[0]
    hint = REMEDIES.get(option.lstrip("-"), "")
    if not hint:
        guess = nearest_option(option, known)
        hint = f"did you mean {guess}?" if guess else f"see {program} --help"
    return MemtrainError(f"{option}: no such option; {hint}")


def _expanded(parsed: Any) -> dict[str, Any]:
    """The paths among the options, with ~ expanded: a shell leaves --folder=~/x as it is."""
    found: dict[str, Any] = {}
    for one in fields(parsed):
        value = getattr(parsed, one.name)
        if isinstance(value, Path):
            found[one.name] = value.expanduser()
        elif isinstance(value, tuple) and any(isinstance(item, Path) for item in value):
            found[one.name] = tuple(item.expanduser() for item in value)
    return found


def _refuse_twice(arguments: list[str], known: list[str]) -> None:
    """The last value would win without a word."""
    given = [one.partition("=")[0].replace("_", "-") for one in arguments if one.startswith("--")]
    plain = [name.replace("--no-", "--").replace(".no-", ".") for name in given]
    for name in known:
        if plain.count(name) > 1:
            pairs = "all pairs go to one: --option size 28 levels 16"
            hint = pairs if name == "--option" else "leave one out"
            raise MemtrainError(f"{name}: given twice; {hint}")


@contextlib.contextmanager
def _flowing_help() -> Iterator[None]:
    """The help of an option is one paragraph: tyro keeps the line breaks of indented docstrings."""
    try:
        import docstring_parser  # tyro's, for now
    except ImportError:
        yield
        return

    read = docstring_parser.parse_from_object

    def read_flowing(obj: object) -> docstring_parser.Docstring:
        found = read(obj)
        for field in found.params:
            field.description = " ".join((field.description or "").split()) or None
        return found

    docstring_parser.parse_from_object = read_flowing
    try:
        yield
    finally:
        docstring_parser.parse_from_object = read


def _plainly(message: str, program: str) -> str:
    """tyro's message without the names of Python's types and of our fields."""
    message = message.removeprefix("Error parsing ").removesuffix(f" {program} --help").rstrip(".")
    message = message.removeprefix("run.")  # the config's own name: no option has it
    if missing := re.match(rf"Missing from {program}: (\S+)", message):
        return f"{missing[1]}: is missing"
    if (wrong := re.match(r"(\S+): no type matching .*? from \['(.*?)'\]\.", message)) or (
        wrong := re.match(r"(\S+): invalid literal for int\(\) with base 10: '(.*)'$", message)
    ):
        whole = "to float" not in message
        return f"{wrong[1]}={wrong[2]}: must be a {'whole ' if whole else ''}number"
    if wrong := re.match(r"(\S+): could not convert string to float: '(.*)'$", message):
        return f"{wrong[1]}={wrong[2]}: must be a number"
    if wrong := re.match(
        r"invalid choice '(.*)' for argument '(.*)'. Expected .*\((.*)\)", message
    ):
        return f"{wrong[2]}={wrong[1]}: must be one of {wrong[3]}".replace("'", "")
    if message.endswith("Failed to parse key-value pairs!"):
        return "--option: takes pairs of a name and a value, for example --option size 28"
    return message


def _option_names(kind: type, value: Any = None, prefix: str = "--") -> list[str]:
    """All options, first those outside groups, last those of stages that have no steps.

    Without a value of the kind, its defaults say which fields are groups.
    """
    names, grouped, unused = [], [], []
    for one in fields(kind):
        inner = one.default if value is None else getattr(value, one.name)
        name = "" if one.name == "run" and is_dataclass(inner) else one.name.replace("_", "-")
        if is_dataclass(inner):
            group = unused if getattr(inner, "steps", 1) == 0 else grouped
            group += _option_names(type(inner), inner, f"{prefix}{name}." if name else prefix)
        else:
            names.append(prefix + name)
    return names + grouped + unused


def peek(arguments: list[str], option: str) -> str | None:
    """The value of an option that has to be known before the others are parsed."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def open_run(folder: Path, allow_code: bool, best: bool = False) -> Any:
    """A run from its folder, if it was ever trained."""
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run

    refuse_name_of_run(folder)
    run = Run.open(folder, allow_code=allow_code, best=best, reporter=make_reporter())
    if not run.progress["stages"]:
        raise MemtrainError(f"{folder}: has no checkpoint yet; memtrain resume {folder} trains it")
    return run


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


def refuse_name_of_run(folder: Path) -> None:
    """Refuse the bare name of a run that is in runs/."""
    there = Path("runs") / folder
    if not folder.exists() and (there / "config.json").is_file():
        raise MemtrainError(f"{folder}: no run there; did you mean {there}?")


def command_name() -> str:
    """How to call memtrain from this folder: by name if it is on the PATH, else by its path.

    A fresh clone has it in .venv/bin, which is not on the PATH until it is activated.
    """
    if shutil.which("memtrain"):
        return "memtrain"
    script = Path(sys.executable).with_name("memtrain")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m memtrain"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
