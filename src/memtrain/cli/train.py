"""memtrain train and memtrain resume."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import (
    Option,
    check_names,
    command_name,
    options_of,
    parse,
    parse_known,
    show_help,
)
from memtrain.config import CELLS, TORCH_CELLS, LabelFile, RunConfig, Series, Stream, check_used
from memtrain.config.serialize import read_config
from memtrain.errors import MemtrainError, printable
from memtrain.recipes import CHOICES, RECIPES, STREAMS, recipe
from memtrain.recipes.sizes import describe_sizes

HELP = {"-h", "--help", "--help-all"}
KEEPS = "and a run keeps its config; leave the option out, or train a new run with --folder"


@dataclass(frozen=True)
class _TrainOptions:
    folder: Path | None = None
    """Run folder (default: runs/NAME)."""
    overwrite: bool = False
    """Delete the run that is in the folder."""
    resume: bool = False
    """Resume the run that is in the folder, with its own config; options that differ from it are
    refused."""
    allow_code: bool = False
    """Import your own cell or task class that a config.json names. Not needed if --cell.kind or
    --data.path names the class."""


@dataclass(frozen=True)
class _StreamOptions(_TrainOptions):
    """Options that choose a recipe of real data; the config's fields can be changed on top."""

    data: tuple[Path, ...] = ()
    """Data to train on: your file or folder, the folder of a data set's files, prepared data, or a
    Hugging Face dataset (hf:NAME). Several texts are joined, and a part of each is held out:
    --data A B, or --data A --data B. It is prepared once, into data/NAME-KEY; the key changes with
    the content and the options, so earlier runs keep their data."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the data preparation, for example for images: --option size 28 levels 16.
    memtrain data --help lists them."""
    size: str | None = None
    method: str | None = None
    """smt-dmt, or bptt: the same data, cell and readout trained by BPTT alone, for comparison, in
    runs/NAME-bptt. --bptt.seconds limits it to the time that the other took."""


FILES = {
    "labels": "that memtrain label or memtrain.Labels wrote.",
    "series": "CSV with a header, parquet or .npy.",
}
"""Recipes that read one file directly, and which."""
FIRST = """
data and model
--data: your file or folder, or prepared data
--data.targets: columns to predict, as a,b (default: all others)
--data.known: columns known beforehand, as a,b
--data.season: steps per season, such as 24 of hourly data
--size: paper, medium, small or tiny models
--method: smt-dmt, or bptt for comparison
--cell.kind: transformer, gru, lstm, mlp, or module:Class
--cell.memory-tokens: tokens in a memory
--teacher.encoder: bidirectional (the paper's) or causal (fast)
training, one stage after another
--pretrain.steps: optimizer steps of the teacher alone
--smt.steps: optimizer steps; 0 skips the stage
--smt.learning-rate: peak learning rate
--smt.batch-size: sequences per step
--smt.accumulate: micro-batches per step, to save memory
--dmt.steps: optimizer steps; 0 skips the stage
--dmt.learning-rate: peak learning rate
--dmt.batch-size: sequences per step
--bptt.steps: optimizer steps; 0 skips the stage
--bptt.learning-rate: peak learning rate
--bptt.batch-size: sequences per step
--seed: the same seed gives the same run
machine
--engine.device: auto, cpu, cuda, cuda:1, ..., or mps
--engine.precision: auto: bf16 on a GPU, fp32 on a CPU
--engine.threads: CPU threads (0: one per core)
run
--folder: run folder (default: runs/NAME)
--overwrite: delete the run that is in the folder
--resume: resume the run that is in the folder
--log.evaluate-every: steps between evaluations
--log.checkpoint-every: steps between checkpoints
"""
"""Sections of the short help: the options that people change first."""


def train(arguments: list[str]) -> int:
    """Train a recipe or a config.json, then evaluate it."""
    if not arguments or arguments[0].startswith("-"):
        return _list_recipes(arguments)
    name, *rest = arguments
    options, default, configure = _parse_train(name, rest)
    config = configure(default)

    from memtrain.runs.distributed import join, restarts
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run

    group = join()
    if options.data and name in STREAMS:
        from memtrain.data.prepare.cache import prepared_stream

        assert isinstance(default.data, Stream)
        prepare = partial(
            prepared_stream,
            *(name, options.data, default.data, options.option),
            report=lambda line: print(printable(line), file=sys.stderr),
        )
        # One process prepares the data, all read it.
        config = configure(replace(default, data=group.from_main(prepare)))
    reporter = make_reporter()
    folder = options.folder or Path("runs") / config.name
    there = (folder / "config.json").exists()
    group.wait()  # all processes check before one of them makes the folder
    if there and (options.resume or restarts()):
        own = read_config(folder / "config.json")
        if options.resume:
            _check_same_config(name, options, config, own, configure)
        allowed = options.allow_code or not _unnamed(own, rest)
        run = Run.open(folder, allow_code=allowed, reporter=reporter, group=group)
    else:
        run = Run.create(config, folder, overwrite=options.overwrite, group=group)
    return _train(run, reporter)


def _parse_train(
    name: str, arguments: list[str]
) -> tuple[_StreamOptions, RunConfig, Callable[[RunConfig], RunConfig]]:
    """Parse and check the arguments after the recipe or config.json.

    Returns:
        The options that choose the recipe; its config; and a function that changes the fields of a
        config which the other options name.
    """
    path, program = Path(name), f"memtrain train {name}"
    _check_source(path)
    options, overrides = parse_known(_StreamOptions, arguments, options_of(_StreamOptions), program)
    default = read_config(path) if path.suffix == ".json" else _recipe(name, options)
    known = _known_options(name, default)
    if HELP & {*arguments}:
        _show_help(program, name, known, everything="--help-all" in arguments)
    check_names(arguments, known, program)
    takes_data = name in (*STREAMS, *FILES)
    hint = "did you mean --data {}?" if takes_data and not options.data else ""
    if options.option and not options.data:
        raise MemtrainError(
            "--option: is for the preparation of data, and none is named; --data PATH names it"
        )
    configure = partial(parse, RunConfig, overrides, program, known, hint=hint)
    config = configure(default)
    choices = CHOICES.get(name, ())
    if "cell" in choices and config.cell.kind in CELLS and config.cell.kind != default.cell.kind:
        default = _recipe(name, options, config.cell.kind)  # as large as the other cell
        config = configure(default)
    tokens = default.cell.memory_tokens
    if config.cell.kind == "lstm" and tokens % 2:  # h and c of each layer
        default = replace(default, cell=replace(default.cell, memory_tokens=tokens + 1))
        config = configure(default)
    check_used(config.cell, default.cell)
    for stage in ("pretrain", "smt", "dmt") if options.method == "bptt" else ():
        if steps := getattr(config, stage).steps:
            raise MemtrainError(
                f"{stage}.steps={steps} with --method bptt, which is BPTT alone; leave one of "
                "them out (--bptt.steps without --method adds BPTT as a last stage)"
            )
    if options.resume and options.overwrite:
        raise MemtrainError("--resume and --overwrite: choose one")
    if path.suffix == ".json" and not options.allow_code:
        for unnamed in _unnamed(config, arguments):
            raise MemtrainError(
                f"{name}: imports {unnamed}; pass --allow-code if you trust it, or name the class "
                "yourself (--cell.kind, --data.path)"
            )
    return options, default, configure


def _list_recipes(arguments: list[str]) -> int:
    helped = HELP & {*arguments[:1]}
    if arguments and not helped:
        raise MemtrainError(
            f"RECIPE: is missing before {arguments[0]}, as in memtrain train text --data book.txt; "
            "memtrain train lists the recipes"
        )
    print("usage: memtrain train RECIPE [OPTIONS]\n\nRecipes:")
    for name, function in RECIPES.items():
        print(f"  {name:<16}{(function.__doc__ or '').splitlines()[0]}")
    print(
        "\nRECIPE may also be a config.json, for example that of another run."
        "\n`memtrain train RECIPE --help` lists the options that are changed most, --help-all "
        "all of\nthem; for example"
        "\n  memtrain train digits --smt.steps 2000 --cell.kind gru --folder runs/gru"
    )
    return 0 if helped else 2


def _check_source(path: Path) -> None:
    """Refuse a run folder, and configs in formats that are not read."""
    if (path / "config.json").is_file():
        raise MemtrainError(
            f"{path}: is a run; memtrain resume {path} continues it, "
            f"memtrain train {path / 'config.json'} trains the same config again"
        )
    if path.suffix in (".yaml", ".yml", ".toml"):
        raise MemtrainError(
            f"{path}: a config is a config.json, such as every run folder holds; "
            "memtrain train runs/NAME/config.json trains it again"
        )


def _recipe(name: str, options: _StreamOptions, cell: str | None = None) -> RunConfig:
    """The recipe with the data, size, method and cell that were chosen."""
    if name in FILES and len(options.data) > 1:
        raise MemtrainError(f"data={str(options.data[1])!r}: {name} takes one file; leave one out")
    if name == "labels" and options.data:
        from memtrain.data.labels import Labels

        return Labels.open(options.data[0]).config(recipe(name, options.size, options.method, cell))
    if name == "series" and options.data:
        chosen = recipe(name, options.size, options.method, cell)
        return replace(chosen, data=Series(path=str(options.data[0])))
    if name in RECIPES and name not in STREAMS and options.data:
        takes = "--data.path" if name in ("mnist-small", "custom") else "no data"
        raise MemtrainError(
            f"data={str(options.data[0])!r}: {name} takes {takes}; "
            f"{', '.join(STREAMS)}, {' and '.join(FILES)} take --data"
        )
    return recipe(name, options.size, options.method, cell)


def _known_options(name: str, default: RunConfig) -> list[Option]:
    """All options of `memtrain train NAME`, with the recipe's defaults."""
    known = options_of(_StreamOptions if name in STREAMS else _TrainOptions)
    own = {"--data"} if name in FILES else set()
    own |= {"--method"} if name not in STREAMS and "method" in CHOICES.get(name, ()) else set()
    known += [one for one in options_of(_StreamOptions) if one.name in own]
    changes: dict[str, dict[str, Any]] = {
        "--size": {"help": describe_sizes(), "default": STREAMS.get(name)},
        "--method": {"default": "smt-dmt"},
    }
    if name in FILES:
        changes["--data"] = {"help": f"The file to train on, which is read directly: {FILES[name]}"}
    known = [one._replace(**changes.get(one.name, {})) for one in known]
    return known + options_of(RunConfig, default)


def _show_help(program: str, name: str, known: list[Option], everything: bool) -> None:
    about = (RECIPES[name].__doc__ if name in RECIPES else f"Train {name}.") or ""
    about = about.splitlines()[0]
    if everything:
        show_help(program, f"{about} Each option changes one field of the run's config.", known)
    by_name = {one.name: one for one in known}
    shown, section = [], ""
    for line in FIRST.strip().splitlines():
        option, colon, text = line.partition(": ")
        section = section if colon else line
        if option in by_name:
            shown.append(by_name[option]._replace(help=text, section=section))
    show_help(program, about, shown, f"All {len(known)} options: {program} --help-all")


def _unnamed(config: RunConfig, arguments: list[str]) -> list[str]:
    """The classes that a config imports and the command line does not name."""
    kind = config.cell.kind
    classes = [kind] if ":" in kind and kind not in TORCH_CELLS else []
    classes += [config.data.path] if config.data.kind == "custom" else []
    given = {argument.rpartition("=")[2] for argument in arguments}
    return [path for path in classes if path not in given]


def _check_same_config(
    name: str, options: _StreamOptions, config: RunConfig, own: RunConfig, configure: Any
) -> None:
    """Refuse to resume if the command line, which makes `config`, differs from the run's `own`."""
    if type(config.data) is not type(own.data):
        raise MemtrainError(
            f"recipe {name}: is of {config.data.kind}, the run of {own.data.kind}; memtrain resume "
            "needs no recipe, --folder names another run"
        )
    if options.size is not None and (config.teacher, config.cell) != (own.teacher, own.cell):
        raise MemtrainError(f"size={options.size}: the run's models have other sizes, {KEEPS}")
    stages, used = (
        ", ".join(key for key, stage in one.stages().items() if stage.steps)
        for one in (config, own)
    )
    if options.method is not None and stages != used:
        raise MemtrainError(f"method={options.method}: the run's stages are {used}, {KEEPS}")
    for key, given, kept in _differences(configure(own), own):
        raise MemtrainError(f"{key}={given}: the run has {key}={kept}, {KEEPS}")
    if options.data:
        _check_same_data(", ".join(map(str, options.data)), config.data, own.data)


def _check_same_data(source: str, prepared: Any, own: Any) -> None:
    """Refuse to resume if the stream prepared from --data is not the run's own."""
    from memtrain.data.store import identity_of, open_store

    paths = [Path(prepared.path), Path(own.path)]
    if paths[0] == paths[1]:
        return
    if isinstance(own, Series):
        from memtrain.data.task import build_task

        both = (replace(own, path=str(path)) for path in paths)
        if paths[1].is_file() and len({build_task(one).identity for one in both}) == 1:
            return
        raise MemtrainError(f"data={source}: the run learns from {paths[1]}, {KEEPS}")
    if isinstance(own, LabelFile):
        from memtrain.data.labels import Labels

        if paths[1].is_file() and len({Labels.open(path).identity for path in paths}) == 1:
            return
        raise MemtrainError(f"data={source}: the run learns from {paths[1]}, {KEEPS}")
    known = (paths[1] / "meta.json").is_file()  # else compare the paths alone
    if known and len({identity_of(open_store(path).splits) for path in paths}) == 1:
        return
    raise MemtrainError(
        f"data={source}: is prepared as {paths[0]}, the run learns from {paths[1]}, and a run "
        "keeps its data; leave --data and --option out, or train a new run with --folder"
    )


def _differences(one: Any, other: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(field, value, other value) wherever two configs of the same type differ."""
    found: list[tuple[str, Any, Any]] = []
    for own in fields(one):
        left, right = getattr(one, own.name), getattr(other, own.name)
        if is_dataclass(left) and type(left) is type(right):
            found += _differences(left, right, f"{prefix}{own.name}.")
        elif left != right:
            found.append((f"{prefix}{own.name}", left, right))
    return found


@dataclass(frozen=True)
class _ResumeOptions:
    """Continue a stopped run. The result equals that of a run that was never stopped, to the bit,
    unless a stage has a time limit."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    allow_code: bool = False
    """Import your own cell or task class that the run's config names."""


def resume(arguments: list[str]) -> int:
    """Continue a stopped run with its own config."""
    for option in (argument.partition("=")[0] for argument in arguments):
        if option.startswith("--") and ("." in option or option in ("--seed", "--name", "--size")):
            raise MemtrainError(
                f"{option}: no such option of resume: a run keeps its config; leave it out, or "
                "train a new run (memtrain train)"
            )
    options = parse(_ResumeOptions, arguments, "memtrain resume")

    from memtrain.runs.distributed import join
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run

    reporter = make_reporter()
    run = Run.open(options.run, allow_code=options.allow_code, reporter=reporter, group=join())
    if run.finished:
        for done in run.progress.stages:
            stage = run.config.stages()[done.name]
            if not stage.seconds and done.steps and done.steps != stage.steps:
                raise MemtrainError(
                    f"{done.name}.steps={stage.steps}: {run.folder} finished this stage after "
                    f"{done.steps} steps, and a finished stage is not lengthened; train a new run"
                )
        run.group.leave()
        if run.group.main:
            print(f"{options.run}: finished already; see it with: memtrain eval {options.run}")
        return 0
    return _train(run, reporter)


def _train(run: Any, reporter: Any) -> int:
    """Train the rest of a run, evaluate it and print the table.

    Returns:
        The exit status: 0, or 128 plus the number of the signal that stopped it (130, 143 or 129).
        A scheduler may then start the same command with --resume, or `memtrain resume`.
    """
    from memtrain.plotting.tables import print_evaluation
    from memtrain.runs.processes import Interrupted, exit_status

    try:
        run.train(reporter)
        result = run.evaluate()
        run.group.leave()
        if run.group.main:
            print_evaluation(result, run)
            print(f"\nrun folder  {run.folder}")
            if run.spelling is not None:
                print(f"sample from it  {command_name()} generate {shlex.quote(str(run.folder))}")
    except (Interrupted, KeyboardInterrupt) as stopped:
        message = str(stopped) if isinstance(stopped, Interrupted) else "stopped, all is saved"
        where = shlex.quote(str(run.folder))
        if run.finished:
            message += f"; the run is finished: memtrain eval {where}"
        elif isinstance(stopped, Interrupted):
            message += f"; continue with: memtrain resume {where}"
        else:
            raise
        if run.group.main:
            print(f"memtrain: {message}", file=sys.stderr)
        return exit_status(stopped)
    return 0
