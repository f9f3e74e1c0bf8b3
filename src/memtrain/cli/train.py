"""memtrain train and memtrain resume."""

import shlex
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from memtrain.cli.args import command_name, parse, peek, refuse_name_of_run
from memtrain.errors import MemtrainError


@dataclass(frozen=True)
class _TrainOptions:
    folder: Path | None = None
    """Where the run lives; runs/NAME unless given."""
    resume: bool = False
    """Go on with the run that is there, with its own config: options that differ from it are
    refused."""
    overwrite: bool = False
    """Delete the run that is there."""
    allow_code: bool = False
    """Import the cell or task of yours that a config.json names. Not needed where --cell.kind or
    --data.path names the class."""


@dataclass(frozen=True)
class _StreamOptions(_TrainOptions):
    size: str = ""
    method: str = "smt-dmt"
    """smt-dmt, or bptt: the same data, cell and readout by BPTT alone, for comparison, in
    runs/NAME-bptt. --bptt.seconds gives it as long as the other took."""
    data: Path | None = None
    """What to learn: a file or folder of yours, the folder of a data set's files, or data that
    was prepared. It is prepared once, into data/NAME-KEY: the key is another one when the content
    or the options are, so earlier runs keep their data."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the preparation, for example of images: --option size 28 levels 16. Those that
    are not given have their defaults; memtrain data --help lists them."""


def train(arguments: list[str]) -> int:
    """Train a recipe or a config.json, then evaluate it."""
    from memtrain.config.serialize import read_config
    from memtrain.recipes import RECIPES

    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        raise MemtrainError(
            f"RECIPE: is missing before {arguments[0]}, as in memtrain train text --data book.txt; "
            "memtrain train lists the recipes"
        )
    if not arguments or arguments[0].startswith("-"):
        print("usage: memtrain train RECIPE [OPTIONS]\n\nRecipes:")
        for name, function in RECIPES.items():
            print(f"  {name:<16}{(function.__doc__ or '').splitlines()[0]}")
        print(
            "\nRECIPE may also be a config.json, for example that of another run."
            "\n`memtrain train RECIPE --help` lists every knob; for example"
            "\n  memtrain train digits --smt.steps 2000 --cell.kind gru --folder runs/gru"
        )
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    name, *rest = arguments
    path = Path(name)
    if (path / "config.json").is_file():
        raise MemtrainError(
            f"{name}: is a run; memtrain resume {name} goes on with it, "
            f"memtrain train {path / 'config.json'} trains the same anew"
        )
    if path.suffix in (".yaml", ".yml", ".toml"):
        raise MemtrainError(
            f"{name}: a config is a config.json, such as every run folder holds; "
            "memtrain train runs/NAME/config.json trains it again"
        )
    default = read_config(path) if path.suffix == ".json" else _recipe(name, rest)
    options, config = _parse_train(rest, name, default)
    if options.resume and options.overwrite:
        raise MemtrainError("--resume and --overwrite: choose one")
    if path.suffix == ".json" and not options.allow_code:
        _check_named(config, rest, name)

    from memtrain.training.console import make_reporter
    from memtrain.training.distributed import join, restarts
    from memtrain.training.run import Run

    group = join()
    if isinstance(options, _StreamOptions) and options.data is not None:
        from memtrain.config import Stream
        from memtrain.data.prepare.cache import prepared_stream

        assert isinstance(default.data, Stream)
        ready = partial(prepared_stream, name, options.data, default.data, options.option)
        made = group.from_main(ready)  # one process prepares, all read it
        options, config = _parse_train(rest, name, replace(default, data=made))
    reporter = make_reporter()
    folder = options.folder or Path("runs") / config.name
    there = (folder / "config.json").exists()
    group.wait()  # all look before one of them makes the folder
    if there and (options.resume or restarts()):
        own = read_config(folder / "config.json")
        if options.resume:
            _check_options(rest, name, config, own)
            if isinstance(options, _StreamOptions) and options.data is not None:
                _check_same_data(options.data, config.data, own.data)
        allowed = options.allow_code or not _unnamed(own, rest)
        run = Run.open(folder, allow_code=allowed, reporter=reporter, group=group)
    else:
        run = Run.create(config, folder, overwrite=options.overwrite, group=group)
    return _train(run, reporter)


def _unnamed(config: Any, arguments: list[str]) -> list[str]:
    """The classes that a config imports and the command line does not name itself."""
    classes = {"--cell.kind": config.cell.kind if ":" in config.cell.kind else None}
    classes["--data.path"] = config.data.path if config.data.kind == "custom" else None
    return [
        path
        for option, path in classes.items()
        if path is not None and peek(arguments, option) != path
    ]


def _check_named(config: Any, arguments: list[str], source: str) -> None:
    """Refuse to import what a config.json names: it may be somebody else's."""
    if unnamed := _unnamed(config, arguments):
        raise MemtrainError(
            f"{source}: imports {unnamed[0]}; pass --allow-code if you trust it, or name the class "
            "yourself (--cell.kind, --data.path)"
        )


def _check_options(arguments: list[str], name: str, asked: Any, own: Any) -> None:
    """Refuse options that differ from the config of the run that is resumed.

    Args:
        arguments: of the command line, after the recipe.
        name: the recipe.
        asked: the config that they make from the recipe.
        own: the run's.
    """
    keeps = "and a run keeps its config; leave the option out, or train a new run with --folder"
    if type(asked.data) is not type(own.data):
        raise MemtrainError(
            f"recipe {name}: is of {asked.data.kind}, the run of {own.data.kind}; memtrain resume "
            "needs no recipe, --folder takes another run"
        )
    size, method = peek(arguments, "--size"), peek(arguments, "--method")
    if size is not None and (
        _differences(asked.teacher, own.teacher) or _differences(asked.cell, own.cell)
    ):
        raise MemtrainError(f"size={size}: the run's models have other sizes, {keeps}")
    used = {key for key, stage in own.stages().items() if stage.steps}
    if method is not None and used != {k for k, stage in asked.stages().items() if stage.steps}:
        raise MemtrainError(f"method={method}: the run's stages are {', '.join(used)}, {keeps}")
    _, changed = _parse_train(arguments, name, own)  # the run's config with these options
    for key, wanted, there in _differences(changed, own):
        raise MemtrainError(f"{key}={wanted}: the run has {key}={there}, {keeps}")


def _check_same_data(asked: Path, prepared: Any, own: Any) -> None:
    """Refuse `--data` of a resumed run where it is not the data that the run learns from.

    Args:
        asked: what the command line names.
        prepared: the stream that was prepared from it.
        own: the run's stream.
    """
    from memtrain.data.store import identity_of, open_store

    paths = [Path(prepared.path), Path(own.path)]
    if paths[0] == paths[1]:
        return
    known = (paths[1] / "meta.json").is_file()  # else the path has to tell
    if known and len({identity_of(open_store(path).splits) for path in paths}) == 1:
        return
    raise MemtrainError(
        f"data={asked}: is prepared as {paths[0]}, the run learns from {paths[1]}, and a run keeps "
        "its data; leave --data and --option out, or train a new run with --folder"
    )


def _differences(one: Any, other: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Field, value and other value wherever two configs of one kind differ."""
    found: list[tuple[str, Any, Any]] = []
    for own in fields(one):
        left, right = getattr(one, own.name), getattr(other, own.name)
        if is_dataclass(left) and type(left) is type(right):
            found += _differences(left, right, f"{prefix}{own.name}.")
        elif left != right:
            found.append((f"{prefix}{own.name}", left, right))
    return found


def _recipe(name: str, arguments: list[str]) -> Any:
    """The recipe for what has to be known before single fields are changed."""
    from memtrain.config import CELLS
    from memtrain.recipes import RECIPES, STREAMS, recipe

    data = peek(arguments, "--data")
    if name in RECIPES and name not in STREAMS and data is not None:
        takes = "--data.path" if name in ("mnist-small", "custom") else "no data of yours"
        raise MemtrainError(
            f"data={data!r}: {name} takes {takes}; {', '.join(STREAMS)} take --data"
        )
    cell = peek(arguments, "--cell.kind")
    fitted = cell if name in STREAMS and cell in CELLS else None
    return recipe(name, peek(arguments, "--size"), peek(arguments, "--method"), fitted)


def _parse_train(arguments: list[str], name: str, default: Any) -> tuple[_TrainOptions, Any]:
    import tyro

    from memtrain.config import RunConfig, check_used
    from memtrain.recipes import STREAMS
    from memtrain.recipes.sizes import describe_sizes

    help_size = tyro.conf.arg(help=describe_sizes())

    @dataclass(frozen=True)
    class TrainStream(_StreamOptions):
        size: Annotated[str, help_size] = STREAMS.get(name, "")
        run: Annotated[RunConfig, tyro.conf.arg(name="")] = default

    @dataclass(frozen=True)
    class TrainTask(_TrainOptions):
        run: Annotated[RunConfig, tyro.conf.arg(name="")] = default

    Train = TrainStream if name in STREAMS else TrainTask
    Train.__doc__ = f"Train {name}. Each option changes one field of the run's config."
    parsed = parse(Train, arguments, f"memtrain train {name}")
    check_used(parsed.run.cell, default.cell)
    if isinstance(parsed, _StreamOptions) and parsed.method == "bptt":
        for stage in ("smt", "dmt"):
            if steps := getattr(parsed.run, stage).steps:
                raise MemtrainError(
                    f"{stage}.steps={steps} with --method bptt, which is BPTT alone; leave one of "
                    "them out (--bptt.steps without --method adds BPTT as a last phase)"
                )
    return parsed, parsed.run


def resume(arguments: list[str]) -> int:
    """Go on where a run stopped, with its own config."""
    import tyro

    @dataclass(frozen=True)
    class Resume:
        """Go on where a run stopped: the result is that of a run never stopped, to the bit,
        unless a stage goes by the clock."""

        run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
        """The run's folder."""
        allow_code: bool = False
        """Import the cell or task of yours that the run's config names."""

    for option in (argument.partition("=")[0] for argument in arguments):
        if option.startswith("--") and ("." in option or option in ("--seed", "--name", "--size")):
            raise MemtrainError(
                f"{option}: no such option of resume: a run keeps its config; leave it out, or "
                "train a new run (memtrain train)"
            )
    options = parse(Resume, arguments, "memtrain resume")

    from memtrain.training.console import make_reporter
    from memtrain.training.distributed import join
    from memtrain.training.run import Run

    reporter = make_reporter()
    refuse_name_of_run(options.run)
    run = Run.open(options.run, allow_code=options.allow_code, reporter=reporter, group=join())
    if run.finished:
        _check_not_lengthened(run)
        run.group.leave()
        if run.group.main:
            print(f"{options.run}: finished already; see it with: memtrain eval {options.run}")
        return 0
    return _train(run, reporter)


def _check_not_lengthened(run: Any) -> None:
    """Refuse a finished run whose config has other steps than it was trained for."""
    for done in run.progress["stages"]:
        stage = run.config.stages()[done["name"]]
        if not stage.seconds and done.get("steps", stage.steps) != stage.steps:
            raise MemtrainError(
                f"{done['name']}.steps={stage.steps}: {run.folder} finished this stage after "
                f"{done['steps']} steps, and a finished stage is not lengthened; train a new run"
            )


def _train(run: Any, reporter: Any) -> int:
    """Train what is left of a run, evaluate it and print the table.

    Returns:
        0, or 128 and the signal's number if one stopped it: 130, 143 or 129. A scheduler may then
        start the same command with --resume, or `memtrain resume`.
    """
    from memtrain.plotting.tables import print_evaluation
    from memtrain.training.processes import Interrupted, exit_status

    try:
        run.train(reporter)
        result = run.evaluate()
        run.group.leave()
        if run.group.main:
            print_evaluation(
                result, run.config.name, run.task.unit, run.progress["stages"], run.metrics.read
            )
            print(f"\nrun folder  {run.folder}")
            if run.spelling is not None:
                print(f"sample from it  {command_name()} generate {shlex.quote(str(run.folder))}")
    except (Interrupted, KeyboardInterrupt) as stopped:
        said = str(stopped) if isinstance(stopped, Interrupted) else "stopped, all is saved"
        where = shlex.quote(str(run.folder))
        if run.finished:
            said += f"; the run is finished: memtrain eval {where}"
        elif isinstance(stopped, Interrupted):
            said += f"; continue with: memtrain resume {where}"
        else:
            raise
        if run.group.main:
            print(f"memtrain: {said}", file=sys.stderr)
        return exit_status(stopped)
    return 0
