"""Command-line arguments: options from dataclasses, parsed by tyro; help and one-line errors."""

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import SequenceMatcher
from itertools import groupby, takewhile
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import docstring_parser
import tyro

from memtrain.errors import MemtrainError

Parsed = TypeVar("Parsed")
HELP = {"-h", "--help", "--help-all"}
NEAR = 0.76
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
    **dict.fromkeys(("initial", "init", "init-from", "checkpoint", "pretrained"), "from"),
    **dict.fromkeys(("wandb", "tensorboard", "trackio", "logger", "tracker"), "track"),
    **dict.fromkeys(("early-stopping", "early-stop"), "patience"),
    **dict.fromkeys(("scheduler", "lr-schedule", "lr-scheduler"), "schedule"),
    "optim": "optimizer",
    **dict.fromkeys(("max-tokens", "max-new-tokens", "num-tokens"), "length"),
    **dict.fromkeys(("temp", "t"), "temperature"),
    **dict.fromkeys(("n", "num-samples", "samples"), "count"),
}
"""Names of options in other programs, and ours."""
RECIPE_OPTIONS = {"--size", "--method"}
"""Options of memtrain train that choose the models and stages, which a run keeps."""
METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT", dict: "NAME VALUE ...", ...: "..."}


class Option(NamedTuple):
    """One option, or positional argument, of a command."""

    name: str
    """--smt.steps, or RUN for a positional argument."""
    kind: Any
    """Its type, without None."""
    default: Any
    help: str
    section: str

    def usage(self) -> str:
        """The option with its values, as the help shows it."""
        if not self.name.startswith("-"):
            name = self.name + "..." * (get_origin(self.kind) is tuple)
            return name if self.default is MISSING else f"[{name}]"
        if self.kind is bool:
            off = re.sub(r"(--|\.)(?=[^.]+$)", r"\1no-", self.name)
            return f"{self.name}, {off}" if self.default else self.name
        if get_origin(self.kind) is Literal:
            return f"{self.name} {'|'.join(get_args(self.kind))}"
        kinds = _kinds(self.kind)
        names = [METAVARS.get(get_origin(kind) or kind, "...") for kind in kinds]
        return " ".join([self.name, *names])

    def description(self) -> str:
        """Its help and default."""
        default = "on" if self.default is True else self.default
        hidden = self.default is False or default in ("", math.inf)
        shown = isinstance(default, str | int | float | Path) and not hidden
        return f"{self.help} [{default}]" if shown else self.help


def _kinds(kind: Any) -> list[Any]:
    """The kinds of an option's values; ... where any number may follow."""
    if get_origin(kind) is not tuple:
        return [kind]
    return [one for part in get_args(kind) for one in _kinds(part)]


def options_of(
    kind: type, values: Any = None, prefix: str = "--", section: str = "options"
) -> list[Option]:
    """The options of a dataclass: its own, then those of groups, last of stages without steps.

    Args:
        kind: the dataclass; fields that hold dataclasses are groups.
        values: an instance with the defaults; those of the class unless given.
        prefix: of the names of all options.
        section: heading in the help.
    """
    docs = {
        field.arg_name: " ".join((field.description or "").split())
        for cls in reversed(kind.__mro__[:-1])
        for field in docstring_parser.parse_from_object(cls).params
    }
    own: list[Option] = []
    groups: list[Option] = []
    skipped: list[Option] = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        value = getattr(kind if values is None else values, name, MISSING)
        option, text = prefix + name.rstrip("_").replace("_", "-"), docs.get(name, "")
        if is_dataclass(value):
            into = skipped if getattr(value, "steps", 1) == 0 else groups
            into += options_of(type(value), value, f"{option}.", f"{name}: {text}")
            continue
        wrapped = get_origin(hint) is Annotated or NoneType in get_args(hint)
        inner = get_args(hint)[0] if wrapped else hint
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            place = sum(one.section == "arguments" for one in own)
            own.insert(place, Option(name.upper(), inner, value, text, "arguments"))
        else:
            own.append(Option(option, inner, value, text, section))
    return own + groups + skipped


def help_width() -> int:
    """Columns of help: those of the terminal, from 60 to 100."""
    return min(max(shutil.get_terminal_size().columns, 60), 100)


def show_help(program: str, description: str, options: Iterable[Option], footer: str = "") -> None:
    """Print the help of a command and exit."""
    options = [option for option in options if len(get_args(option.kind)) != 1]
    names = [option.usage() for option in options if option.section == "arguments"]
    print("usage:", program, *names, "[OPTIONS]\n")
    width = help_width()
    print(textwrap.fill(" ".join(description.split()), width))
    for section, group in groupby(options, lambda option: option.section):
        print(f"\n{section}")
        for option in group:
            left = f"  {option.usage()}".ljust(28)
            lines = textwrap.wrap(option.description(), width - 28, break_on_hyphens=False)
            if left.endswith("  ") and lines:
                left += lines.pop(0)
            print(left.rstrip(), *(" " * 28 + line for line in lines), sep="\n")
    if footer:
        print(f"\n{footer}")
    raise SystemExit(0)


def parse(
    kind: type[Parsed],
    arguments: list[str],
    program: str,
    options: list[Option] | None = None,
    default: Parsed | None = None,
    hint: str = "",
    footer: str = "",
) -> Parsed:
    """Parse the arguments of a command; a mistake is one line with the nearest name.

    Args:
        kind: the dataclass of its options.
        arguments: of the command line.
        program: the command, for help and errors.
        options: all options that the command knows; those of `kind` unless given.
        default: an instance with the defaults.
        hint: what to do about an argument that belongs to no option.
        footer: ends the help.
    """
    options = options or options_of(kind)
    if {"-h", "--help"} & {*arguments}:
        show_help(program, kind.__doc__ or "", options, footer)
    check_names(arguments, options, program)
    parsed, unknown = parse_known(kind, arguments, options, program, default)
    if unknown:
        hint = hint.format(unknown[0]) or f"see {program} --help"
        raise MemtrainError(f"{unknown[0]!r}: unexpected argument; {hint}")
    return parsed


def parse_known(
    kind: type[Parsed],
    arguments: list[str],
    options: list[Option],
    program: str,
    default: Parsed | None = None,
) -> tuple[Parsed, list[str]]:
    """Parse the options of a dataclass; returns it and the arguments that are not its own."""
    arguments = _joined(arguments, options)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's own report takes ten lines
            parsed, unknown = tyro.cli(
                kind,
                args=arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
                add_help=False,
            )
    except SystemExit as stop:
        raise MemtrainError(_reason(stop, arguments, options, program)) from None
    values = {one.name: _expanded(getattr(parsed, one.name)) for one in fields(parsed)}  # type: ignore[arg-type]
    return type(parsed)(**values), unknown


def _reason(stop: SystemExit, arguments: list[str], options: list[Option], program: str) -> str:
    """Why tyro refused the arguments."""
    cause, group = stop.__context__, ""
    while cause is not None:
        if isinstance(cause, MemtrainError):  # a config's own check
            reason = cause.command_line
            return f"{group}: {reason}" if group else reason
        argument = getattr(cause, "arg", "")  # tyro's error around it names the group
        group = argument if isinstance(argument, str) else ""
        cause = cause.__context__
    problem = _bad_value(arguments, options)
    if not problem and options[0].section == "arguments":
        kind = options[0].kind
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        problem = f"must be one of {', '.join(choices)}" if choices else "is missing"
        problem = f"{options[0].name}: {problem}"
    return f"{problem or 'arguments: not understood'}; see {program} --help"


def _bad_value(arguments: list[str], options: list[Option]) -> str:
    """The first value that its option cannot take, and the rule."""
    known = {option.name: option for option in options if option.kind is not bool}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        option = known.get(_plain(name))
        if option is None:
            continue
        following = takewhile(lambda one: not one.startswith("--"), arguments[index + 1 :])
        values = [value] if equals else list(following)
        origin = get_origin(option.kind)
        if origin is dict and (not values or len(values) % 2):
            return f"{name}: takes pairs of a name and a value, for example {name} size 28"
        kinds = [kind for kind in _kinds(option.kind) if kind is not ...]
        if ... in get_args(option.kind) and len(kinds) > 1:  # of pairs
            if len(values) % len(kinds):
                return f"{name}={' '.join(values)}: takes pairs, here are {len(values)} values"
            kinds = kinds * (len(values) // len(kinds))
        if len(values) < len(kinds):
            return f"{name}: needs {'a value' if len(kinds) == 1 else f'{len(kinds)} values'}"
        for one, text in zip(kinds, values, strict=False):
            if get_origin(one) is Literal and text not in get_args(one):
                return f"{name}={text}: must be one of {', '.join(get_args(one))}"
            try:
                _ = one(text) if one in (int, float) else None
            except ValueError:
                return f"{name}={text}: must be a {'whole ' * (one is int)}number"
    return ""


def _plain(name: str) -> str:
    """The name of an option as `options_of` spells it."""
    return name.replace("_", "-").replace("--no-", "--").replace(".no-", ".")


def check_names(arguments: list[str], options: list[Option], program: str) -> None:
    """Refuse options that do not exist, and options given twice, of which tyro takes the last.

    A line of dashes is a value: --option divider ---.
    """
    known = [option.name for option in options]
    repeatable = {option.name for option in options if ... in get_args(option.kind)}
    given: set[str] = set()
    for name in (one.partition("=")[0] for one in arguments if re.match(r"-(?!--+$)[^\d.]", one)):
        plain = _plain(name)
        if plain not in known:
            guess = nearest_option(name, known)
            hint = f"did you mean {guess}?" if guess else f"see {program} --help"
            if name == "--config":
                hint = "give a config.json in place of the recipe: memtrain train config.json"
            elif plain in RECIPE_OPTIONS and program == "memtrain resume":
                hint = "a run keeps its recipe; memtrain train makes another run"
            raise MemtrainError(f"{name}: no such option; {hint}")
        if plain in given - repeatable:
            once = {
                "--option": "all pairs go to one: --option size 28 levels 16",
                "--track": "several as a,b: --track tensorboard,wandb",
            }
            raise MemtrainError(f"{plain}: given twice; {once.get(plain, 'leave one out')}")
        given.add(plain)
    pairs = {option.name for option in options if get_origin(option.kind) is dict}
    for index, argument in enumerate(arguments):
        if _plain(argument) in pairs:
            values = takewhile(lambda one: not one.startswith("--"), arguments[index + 1 :])
            names = [*values][::2]
            if len({*names}) < len(names):
                twice = max(names, key=names.count)
                raise MemtrainError(f"{argument} {twice}: given twice; leave one out")


def _joined(arguments: list[str], options: list[Option]) -> list[str]:
    """Join what an option of several values is given in several places: --data A --data B."""
    several = {o.name for o in options if o.name.startswith("--") and ... in get_args(o.kind)}
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    values = rest
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if _plain(name) in several:
            values = found.setdefault(_plain(name), [])
            values += [value] if equals else []
        elif argument.startswith("--"):
            values = rest
            rest.append(argument)
        else:
            values.append(argument)
    for name in (name for name, given in found.items() if not given):
        raise MemtrainError(f"{name}: needs a value")
    return rest + [one for name, given in found.items() for one in (name, *given)]


def nearest_option(option: str, known: list[str]) -> str:
    """The option that was probably meant; "" unless one is close.

    Args:
        option: the name given, for example --lr or --smt.lr.
        known: all options; of equally similar ones the first is chosen.
    """
    group, _, leaf = option.lstrip("-").lower().replace("_", "-").rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)

    def similarity(name: str) -> float:
        """Of group and leaf, the less similar one: a right group must not excuse a wrong leaf."""
        other_group, _, other_leaf = name.lstrip("-").rpartition(".")
        ratio = SequenceMatcher(None, leaf, other_leaf).ratio()
        return min(ratio, SequenceMatcher(None, group, other_group).ratio()) if group else ratio

    best = max(known, key=similarity, default="")
    return best if best and similarity(best) >= NEAR else ""


def _expanded(value: Any) -> Any:
    """A path, or several, with ~ expanded, which a shell does not do in --folder=~/x."""
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    # Path.expanduser would raise at ~nobody.
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


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
