"""Command-line arguments: options from dataclasses, parsed by tyro; help and one-line errors."""

import contextlib
import io
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from memtrain.errors import MemtrainError

Parsed = TypeVar("Parsed")
NEAR = 0.75
"""How similar a name must be to be suggested: a wrong suggestion is worse than none."""
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
"""Names of options in other programs, and ours."""
METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT", dict: "NAME VALUE ..."}


class Option(NamedTuple):
    """One option, or positional argument, of a command."""

    name: str
    """--smt.steps, or RUN for a positional argument."""
    kind: Any
    """Its type without None; a Literal's choices are checked by `_bad_value`."""
    default: Any
    help: str
    section: str = "options"

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")

    def usage(self) -> str:
        """The option as the help shows it."""
        if self.positional:
            dots = "..." if get_origin(self.kind) is tuple else ""
            return self.name + dots if self.default is MISSING else f"[{self.name}{dots}]"
        if self.kind is bool:
            group, dot, leaf = self.name.removeprefix("--").rpartition(".")
            return f"{self.name}, --{group}{dot}no-{leaf}" if self.default else self.name
        values = get_args(self.kind) if get_origin(self.kind) is tuple else [self.kind]
        return " ".join([self.name, *(self.metavar(value) for value in values)])

    @staticmethod
    def metavar(kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        return METAVARS.get(get_origin(kind) or kind, "VALUE")

    def description(self) -> str:
        """Its help and default."""
        default = "on" if self.default is True else self.default
        hidden = self.default is False or default in ("", math.inf)
        shown = isinstance(default, str | int | float | Path) and not hidden
        return f"{self.help} [{default}]" if shown else self.help


def options_of(
    kind: type, values: Any = None, prefix: str = "--", section: str = "options"
) -> list[Option]:
    """The options of a dataclass: first its own, then groups, then stages without steps.

    Args:
        kind: the dataclass; fields that hold dataclasses are groups.
        values: an instance with the defaults; those of the class unless given.
        prefix: of the names of all options.
        section: heading in the help.
    """
    hints, docs = get_type_hints(kind, include_extras=True), _field_docs(kind)
    own: list[Option] = []
    groups: list[Option] = []
    skipped: list[Option] = []
    for one in fields(kind):
        value = one.default if values is None else getattr(values, one.name)
        name, hint, text = one.name.replace("_", "-"), hints[one.name], docs.get(one.name, "")
        if is_dataclass(value):
            into = skipped if getattr(value, "steps", 1) == 0 else groups
            into += options_of(type(value), value, f"{prefix}{name}.", f"{one.name}: {text}")
            continue
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            name, hint = name.upper(), get_args(hint)[0]
        else:
            name = prefix + name
        optional = NoneType in get_args(hint)
        own.append(Option(name, get_args(hint)[0] if optional else hint, value, text, section))
    return own + groups + skipped


def _field_docs(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and its bases, each as one paragraph."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        for field in docstring_parser.parse_from_object(cls).params:
            found[field.arg_name] = " ".join((field.description or "").split())
    return found


def show_help(program: str, description: str, options: Iterable[Option], footer: str = "") -> None:
    """Print the help of a command and exit."""
    options = [option for option in options if len(get_args(option.kind)) != 1]
    names = " ".join(option.usage() for option in options if option.positional)
    print(f"usage: {program} {names}{' ' * bool(names)}[OPTIONS]\n")
    width = min(shutil.get_terminal_size().columns, 100)
    print(textwrap.fill(" ".join(description.split()), width))
    section = ""
    for option in options:
        title = "arguments" if option.positional else option.section
        if title != section:
            section = title
            print(f"\n{section}")
        left = f"  {option.usage()}".ljust(28)
        lines = textwrap.wrap(option.description(), width - 28, break_on_hyphens=False)
        if left.endswith("  ") and lines:
            left += lines.pop(0)
        print(left.rstrip(), *(" " * 28 + line for line in lines), sep="\n")
    if footer:
        print(f"\n{footer}")
    raise SystemExit(0)


def wants_help(arguments: Sequence[str], *names: str) -> bool:
    return not {"-h", "--help", *names}.isdisjoint(arguments)


def parse(kind: type[Parsed], arguments: list[str], program: str) -> Parsed:
    """Parse the arguments of a command; mistakes are one line with the nearest name."""
    options = options_of(kind)
    if wants_help(arguments):
        show_help(program, kind.__doc__ or "", options)
    check_names(arguments, options, program)
    parsed, unknown = parse_known(kind, arguments, options, program)
    refuse(unknown, options, program)
    return parsed


def parse_known(
    kind: type[Parsed],
    arguments: list[str],
    options: list[Option],
    program: str,
    default: Parsed | None = None,
) -> tuple[Parsed, list[str]]:
    """Parse the options of a dataclass; returns it and the arguments that are not its own."""
    given = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's own report takes ten lines
            parsed, unknown = tyro.cli(
                kind,
                args=arguments,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
                add_help=False,
                **given,
            )
    except SystemExit as stop:
        raise MemtrainError(_reason(stop, arguments, options, program)) from None
    return replace(parsed, **_expanded(parsed)), unknown  # type: ignore[type-var]


def _reason(stop: BaseException, arguments: list[str], options: list[Option], program: str) -> str:
    """Why tyro refused the arguments."""
    cause: BaseException | None = stop
    group = ""
    while cause is not None:
        if isinstance(cause, MemtrainError):  # a config's own check
            return f"{group}: {cause}" if group else str(cause)
        group = getattr(cause, "arg", group)  # of tyro's error around it
        group = group if isinstance(group, str) else ""
        cause = cause.__context__
    bad = _bad_value(arguments, options)
    if not bad:
        missing = [one.name for one in options if one.positional and one.default is MISSING]
        bad = f"{missing[0]}: is missing" if missing else "arguments: not understood"
    return f"{bad}; see {program} --help"


def _bad_value(arguments: list[str], options: list[Option]) -> str:
    """The first value that its option cannot take, and the rule."""
    known = {option.name: option for option in options}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        option = known.get(_plain(name))
        if option is None or option.kind is bool:
            continue
        following = takewhile(lambda one: not one.startswith("--"), arguments[index + 1 :])
        values = [value] if equals else list(following)
        kind = get_origin(option.kind) or option.kind
        if kind is dict and (not values or len(values) % 2):
            return f"{name}: takes pairs of a name and a value, for example {name} size 28"
        kinds = get_args(option.kind) if kind is tuple else [option.kind]
        if len(values) < len(kinds):
            number = "a value" if len(kinds) == 1 else f"{len(kinds)} values"
            return f"{name}: needs {number}"
        for one, text in zip(kinds, values, strict=False):
            if get_origin(one) is Literal and text not in get_args(one):
                return f"{name}={text}: must be one of {', '.join(get_args(one))}"
            if one in (int, float) and not _is_number(text, one):
                return f"{name}={text}: must be a {'whole ' * (one is int)}number"
    return ""


def _is_number(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    """The name of an option as `options_of` spells it."""
    return name.replace("_", "-").replace("--no-", "--").replace(".no-", ".")


def check_names(arguments: list[str], options: list[Option], program: str) -> None:
    """Refuse options that do not exist, and options given twice, of which tyro takes the last."""
    known = [option.name for option in options]
    given: set[str] = set()
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name.replace("_", "-") not in known and _plain(name) not in known:
            raise _no_such_option(name, known, program)
        if _plain(name) in given:
            pairs = "all pairs go to one: --option size 28 levels 16"
            hint = pairs if name == "--option" else "leave one out"
            raise MemtrainError(f"{_plain(name)}: given twice; {hint}")
        given.add(_plain(name))


def refuse(unknown: list[str], options: list[Option], program: str, hint: str = "") -> None:
    """Refuse arguments that belong to no option."""
    if unknown and unknown[0].startswith("-"):
        raise _no_such_option(unknown[0], [option.name for option in options], program)
    if unknown:
        hint = hint or f"see {program} --help"
        raise MemtrainError(f"{unknown[0]!r}: unexpected argument; {hint}")


def _no_such_option(name: str, known: list[str], program: str) -> MemtrainError:
    guess = nearest_option(name, known)
    hint = f"did you mean {guess}?" if guess else f"see {program} --help"
    if name == "--config":
        hint = "give a config.json in place of the recipe: memtrain train config.json"
    return MemtrainError(f"{name}: no such option; {hint}")


def nearest_option(option: str, known: list[str]) -> str:
    """The option that was probably meant; "" unless one is close.

    Args:
        option: the name given, for example --lr or --smt.lr.
        known: all options, the most important ones first.
    """
    group, _, leaf = option.lstrip("-").lower().replace("_", "-").rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)
    same = [name for name in known if name.lstrip("-").rpartition(".")[2] == leaf]
    if group:
        same = [name for name in same if name == f"--{group}.{leaf}"]
    if same:
        return same[0]
    near = {name: _similarity(group, leaf, name.lstrip("-")) for name in known}
    best = max(near, key=lambda name: near[name], default="")
    return best if best and near[best] >= NEAR else ""


def _similarity(group: str, leaf: str, name: str) -> float:
    """Of group and leaf, the less similar one: a right group must not excuse a wrong leaf."""
    other_group, _, other_leaf = name.rpartition(".")
    ratio = SequenceMatcher(None, leaf, other_leaf).ratio()
    return min(ratio, SequenceMatcher(None, group, other_group).ratio()) if group else ratio


def _expanded(parsed: Any) -> dict[str, Any]:
    """The paths of parsed options with ~ expanded, which a shell does not do in --folder=~/x."""
    found: dict[str, Any] = {}
    for one in fields(parsed):
        value = getattr(parsed, one.name)
        if isinstance(value, Path):
            found[one.name] = value.expanduser()
        elif isinstance(value, tuple) and any(isinstance(item, Path) for item in value):
            found[one.name] = tuple(item.expanduser() for item in value)
    return found


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
