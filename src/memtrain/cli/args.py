"""From arguments to options, with errors in one line."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from memtrain.cli.suggest import REMEDIES, nearest_option, refuse_name_of_run
from memtrain.errors import MemtrainError

Parsed = TypeVar("Parsed")


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
