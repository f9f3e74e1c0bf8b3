"""memtrain train."""

import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from memtrain.cli.args import (
    HELP,
    Option,
    check_names,
    command_name,
    help_width,
    options_of,
    parse,
    parse_known,
    show_help,
)
from memtrain.cli.resume import changes_of
from memtrain.config import CELLS, TORCH_CELLS, RunConfig, Series, Stream, check_used
from memtrain.config.serialize import read_config
from memtrain.errors import MemtrainError, printable
from memtrain.recipes import CHOICES, RECIPES, STREAMS, recipe
from memtrain.recipes.sizes import describe_sizes


@dataclass(frozen=True)
class _TrainOptions:
    folder: Path | None = None
    """Run folder (default: runs/NAME)."""
    overwrite: bool = False
    """Delete the run that is in the folder."""
    resume: bool = False
    """Resume the run that is in the folder, with its own config. Of the options that differ from it
    some lengthen or change it (docs/TRAINING.md), the others are refused."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Start from the weights of this run, of one of its checkpoints, or of a pretrained model such
    as mnist-small; the optimizer starts from nothing."""
    track: str = ""
    """Also send the metrics to tensorboard, wandb or trackio, several as a,b. A run that continues
    keeps its trackers; none turns them off."""
    after_save: str = ""
    """Run this command after each checkpoint, beside training, as 'aws s3 sync {folder}
    s3://bucket/{name}'; its failure is reported and stops nothing (docs/guides/clusters.md)."""
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
    """smt-dmt; smt: SMT alone, in segments of 16 steps of the cell, in runs/NAME-smt; bptt: the
    same data, cell and readout trained by BPTT alone, for comparison, in runs/NAME-bptt; or pieces:
    by BPTT in pieces of 16 steps that are trained at once, in runs/NAME-pieces. --bptt.seconds
    limits them to the time that the other took."""


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
--method: smt-dmt, smt, bptt or pieces
--cell.kind: also gru, lstm, mlp, attention or module:Class
--cell.memory-tokens: tokens in a memory
--teacher.encoder: the paper's, or causal (fast)
training, one stage after another
--pretrain.steps: optimizer steps of the teacher alone
--smt.steps: optimizer steps; 0 skips the stage
--smt.learning-rate: peak learning rate
--smt.batch-size: sequences per step
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
--from: a run whose weights it starts from
--track: tensorboard, wandb, trackio, as a,b
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
    from memtrain.training.after_save import AfterSave
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run
    from memtrain.training.trackers import make_trackers

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
    trackers = make_trackers(options.track, folder)
    hooks = [AfterSave(options.after_save, reporter.say)] if options.after_save else []
    there = (folder / "config.json").exists()
    group.wait()  # all processes check before one of them makes the folder
    if there and (options.resume or restarts()):
        own, changes = read_config(folder / "config.json"), {}
        if options.resume:
            changes = changes_of(name, options, config, own, configure)
        allowed = options.allow_code or not _unnamed(own, rest)
        run = Run.open(folder, allow_code=allowed, changes=changes, reporter=reporter, group=group)
    else:
        run = Run.create(
            config,
            folder,
            overwrite=options.overwrite,
            initial=_initial(config.initial),
            reporter=reporter,
            group=group,
        )
    return train_and_evaluate(run, reporter, trackers, hooks)


def _initial(source: str) -> Any:
    """What --from names: a run, a checkpoint, or a pretrained model."""
    from memtrain.generation.pretrained import load_pretrained, pretrained_names

    if not source or Path(source).exists():
        return source or None
    if source in pretrained_names():
        return load_pretrained(source)
    hint = f"did you mean runs/{source}?" if (Path("runs") / source).exists() else ""
    hint = hint or f"a run's folder, or one of {', '.join(pretrained_names())}"
    raise MemtrainError(f"--from {source}: no run there; {hint}")


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
    if options.from_:  # that run may have a teacher, which DMT alone needs
        default = replace(default, initial=options.from_)
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
        other = _recipe(name, options, config.cell.kind)  # as large as the other cell
        default = replace(other, initial=default.initial)
        config = configure(default)
    tokens = default.cell.memory_tokens
    if config.cell.kind == "lstm" and tokens % 2:  # h and c of each layer
        default = replace(default, cell=replace(default.cell, memory_tokens=tokens + 1))
        config = configure(default)
    check_used(config.cell, default.cell)
    for stage in ("pretrain", "smt", "dmt") if options.method in ("bptt", "pieces") else ():
        if steps := getattr(config, stage).steps:
            raise MemtrainError(
                f"{stage}.steps={steps} with --method {options.method}, which is BPTT alone; leave "
                "one of them out (--bptt.steps without --method adds BPTT as a last stage)"
            )
    if options.resume and options.overwrite:
        raise MemtrainError("--resume and --overwrite: choose one")
    if options.resume and options.from_:
        raise MemtrainError(
            "--resume and --from: choose one; a run that continues has its own weights"
        )
    if path.suffix == ".json" and not options.allow_code:
        for unnamed in _unnamed(config, arguments):
            raise MemtrainError(
                f"{name}: imports {unnamed}; pass --allow-code if you trust it, or name the class "
                "yourself (--cell.kind, --data.path, --smt.optimizer)"
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
    width = max(map(len, RECIPES)) + 2
    for name, function in RECIPES.items():
        about = (function.__doc__ or "").splitlines()[0]
        lines = textwrap.wrap(about, help_width() - width - 2, break_on_hyphens=False)
        print(f"  {name:<{width}}", f"\n{'':{width + 2}}".join(lines), sep="")
    print(
        "\nRECIPE may also be a config.json, for example that of another run."
        "\n`memtrain train RECIPE --help` lists the options that are changed most,"
        "\n--help-all all of them; for example"
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
    return known + [one for one in options_of(RunConfig, default) if one.name != "--initial"]


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
    stages = [stage for stage in config.stages().values() if stage.steps]
    named = [stage.optimizer for stage in stages if ":" in stage.optimizer]
    classes += [path for path in named if not path.startswith("torch.")]
    given = {argument.rpartition("=")[2] for argument in arguments}
    return [path for path in classes if path not in given]


def train_and_evaluate(
    run: Any, reporter: Any, trackers: Sequence[Any], hooks: Sequence[Any] = ()
) -> int:
    """Train the rest of a run, evaluate it and print the table.

    Args:
        run: the run.
        reporter: shows its progress.
        trackers: copies of its metrics.
        hooks: further callbacks.

    Returns:
        The exit status: 0, or 128 plus the number of the signal that stopped it (130, 143 or 129),
        or 75 after SIGUSR1. A scheduler may then start the same command with --resume, or
        `memtrain resume`.
    """
    from memtrain.plotting.tables import print_evaluation
    from memtrain.runs.processes import Interrupted, exit_status

    try:
        run.train(reporter, callbacks=[*trackers, *hooks])
        result = run.evaluate()
        run.group.leave()
        if run.group.main:
            print_evaluation(result, run)
            print(f"\nrun folder  {run.folder}")
            for tracker in trackers:
                print(f"watch it    {tracker.where()}")
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
