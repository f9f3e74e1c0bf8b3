"""The command line. `memtrain --help` shows the commands, `memtrain COMMAND --help` teaches one.

Only what a command needs is imported when it runs: help is quick, training imports torch.
"""

import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from memtrain.errors import MemtrainError, nearest
from memtrain.version import VERSION

OVERVIEW = f"""\
memtrain {VERSION}: recurrent networks, trained without unrolling them.

usage: memtrain COMMAND [OPTIONS]

  demo              one minute each of SMT -> DMT and of BPTT on the same cell, a table, a page
  train RECIPE      train a recipe, or a config.json, into a run folder
  resume RUN        go on where a run stopped
  eval RUN          losses, accuracy, drift and cost of a run
  generate RUN      let the recurrent network write: text, or pictures as a PNG grid
  data [NAME]       list tasks and data sets, show samples, or prepare real data
  bench [SUITE]     time training steps and generation on this machine
  reproduce FIGURE  run the grid of a figure of the paper, draw it, say whether its claim holds
  report [FOLDER]   one page of all that was reproduced

Start with
  memtrain demo
  memtrain train digits
  memtrain eval runs/digits
  memtrain generate runs/digits

Every command explains itself with --help; `memtrain train RECIPE --help` lists every knob.
"""

Parsed = TypeVar("Parsed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    if arguments[0] in ("--version", "-V"):
        print(VERSION)
        return 0
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise MemtrainError(f"command {name!r}: {nearest(name, COMMANDS)}")
        return COMMANDS[name](rest)
    except MemtrainError as error:
        print(f"memtrain: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except MemoryError:
        print("memtrain: not enough memory; take less at once", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"memtrain: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("memtrain: stopped", file=sys.stderr)
        return 130


# -------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class _TrainOptions:
    folder: Path | None = None
    """Where the run lives; runs/NAME unless given."""
    resume: bool = False
    """Go on with the run that is there; its own config is used."""
    overwrite: bool = False
    """Delete the run that is there."""
    allow_code: bool = False
    """With --resume: import the cell or task of yours that the run's own config names."""


@dataclass(frozen=True)
class _StreamOptions(_TrainOptions):
    size: str = ""
    data: Path | None = None
    """What to learn: a file or folder of yours, the folder of a data set's files, or data that
    was prepared. It is prepared once, into data/NAME."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the preparation, for example of images: --option size 28 levels 16."""


def train(arguments: list[str]) -> int:
    """Train a recipe or a config.json, then evaluate it."""
    from memtrain.config_json import read_config
    from memtrain.recipes import RECIPES, recipe

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
    default = read_config(path) if path.suffix == ".json" else recipe(name, _peek(rest, "--size"))
    options, config = _parse_train(rest, name, default)
    if options.resume and options.overwrite:
        raise MemtrainError("--resume and --overwrite: choose one")
    if isinstance(options, _StreamOptions) and options.data is not None:
        from memtrain.config import Stream
        from memtrain.data.ready import ready_stream

        assert isinstance(default.data, Stream)
        made = ready_stream(name, options.data, default.data, options.option)
        options, config = _parse_train(rest, name, replace(default, data=made))

    from memtrain.run import Run
    from memtrain.train.distributed import join, restarted
    from memtrain.train.metrics import make_reporter

    group = join()
    reporter = make_reporter()
    folder = options.folder or Path("runs") / config.name
    there = (folder / "config.json").exists()
    group.wait()  # all look before one of them makes the folder
    if there and (options.resume or restarted()):
        run = Run.open(folder, allow_code=options.allow_code, reporter=reporter, group=group)
    else:
        run = Run.create(config, folder, overwrite=options.overwrite, group=group)
    return _train(run, reporter)


def _parse_train(arguments: list[str], name: str, default: Any) -> tuple[_TrainOptions, Any]:
    import tyro

    from memtrain.config import RunConfig
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
    parsed = _parse(Train, arguments, f"memtrain train {name}")
    return parsed, parsed.run


def resume(arguments: list[str]) -> int:
    """Go on where a run stopped, with its own config."""
    import tyro

    @dataclass(frozen=True)
    class Resume:
        """Go on where a run stopped: the result is that of a run never stopped, to the bit."""

        run: tyro.conf.Positional[Path]
        """The run's folder."""
        allow_code: bool = False
        """Import the cell or task of yours that the run's config names."""

    options = _parse(Resume, arguments, "memtrain resume")

    from memtrain.run import Run
    from memtrain.train.distributed import join
    from memtrain.train.metrics import make_reporter

    reporter = make_reporter()
    run = Run.open(options.run, allow_code=options.allow_code, reporter=reporter, group=join())
    if run.finished:
        print(f"{options.run}: finished already; see it with: memtrain eval {options.run}")
        return 0
    return _train(run, reporter)


def _train(run: Any, reporter: Any) -> int:
    from memtrain.run import Interrupted
    from memtrain.tables import print_evaluation

    try:
        run.train(reporter)
    except Interrupted as interrupted:
        if run.group.main:
            how = f"go on with: memtrain resume {run.folder}"
            print(f"memtrain: {interrupted}; {how}", file=sys.stderr)
        return 0 if interrupted.signal_number == signal.SIGTERM else 130
    result = run.evaluate()
    run.group.leave()
    if not run.group.main:
        return 0
    print_evaluation(run, result)
    print(f"\nrun folder  {run.folder}")
    if run.spelling is not None:
        print(f"let it write  memtrain generate {run.folder}")
    return 0


def evaluate(arguments: list[str]) -> int:
    """Losses, accuracy, drift and cost of a run."""
    import tyro

    @dataclass(frozen=True)
    class Evaluate:
        """Score a run on held-out sequences: teacher, RNN from the empty memory and from the
        teacher's, over the whole sequence and against the position in it; how far their memories
        drift apart; count models on the same targets; and what training cost. A figure and its
        numbers go to RUN/figures."""

        run: tyro.conf.Positional[Path]
        """The run's folder."""
        sequences: int | None = None
        """Held-out sequences to score (fewer if the data has fewer); a few seconds' worth if not
        given."""
        length: int | None = None
        """Tokens in a held-out sequence of a stream, data.evaluate_length unless given. Longer
        than what was trained shows whether the RNN holds: 1568 (two MNIST images), 4096 (text)."""
        json: bool = False
        """Print one JSON object as the last line of stdout, nothing else there."""
        best: bool = False
        """Take the checkpoint with the lowest held-out loss instead of the newest."""
        allow_code: bool = False
        """Import the cell or task of yours that the run's config names."""

    options = _parse(Evaluate, arguments, "memtrain eval")
    if options.sequences is not None and options.sequences < 1:
        raise MemtrainError(f"sequences={options.sequences}: must be at least 1")

    from memtrain.eval.figure import save_figure
    from memtrain.tables import print_evaluation

    run = _open(options.run, options.allow_code, options.best)
    result = run.evaluate(options.sequences, length=options.length, baselines=True)
    record = {"run": str(options.run), "unit": run.task.unit, **asdict(result)}
    text = json.dumps(record | {"stages": run.progress["stages"], **run.totals()})
    figure = options.run / "figures" / f"evaluation-{result.length}.png"
    save_figure(result, figure, run.config.name, run.task.unit)
    figure.with_suffix(".json").write_text(text + "\n")
    if options.json:
        print(text)
    else:
        print_evaluation(run, result)
        print(f"figure  {figure}")
    return 0


def generate(arguments: list[str]) -> int:
    """Let the recurrent network write, from the empty memory and without its teacher."""
    import tyro

    @dataclass(frozen=True)
    class Generate:
        """Let the recurrent network write: text to the terminal, pictures as a PNG grid. It starts
        from the empty memory; the teacher is not used."""

        run: tyro.conf.Positional[str]
        """The run's folder, or the name of a pretrained model."""
        count: int | None = None
        """How many: 1 text or 64 pictures unless given."""
        length: int | None = None
        """Characters to write (text)."""
        prompt: str | None = None
        """Read first (text)."""
        given: float | None = None
        """Complete held-out images of which this share is given, from the top."""
        image: Path | None = None
        """Complete this PNG or JPEG, resized as the data was; the first half is given unless
        --given says more."""
        temperature: float = 1.0
        """Below 1 is safer, above 1 is wilder, 0 takes the likeliest token."""
        top_k: int = 0
        """Choose among the k likeliest tokens only (0: all)."""
        top_p: float = 1.0
        """Choose among the likeliest tokens that together have this probability."""
        seed: int = 0
        """The same seed gives the same sequences."""
        out: Path | None = None
        """The picture's file, RUN/samples/... unless given; also keeps text."""
        best: bool = False
        """Take the checkpoint with the lowest held-out loss instead of the newest."""
        allow_code: bool = False
        """Import the cell or task of yours that the run's config names."""

    options = _parse(Generate, arguments, "memtrain generate")

    from memtrain.authoring import Wish, find_writer, write_wish
    from memtrain.train.metrics import make_reporter

    values = {one.name: getattr(options, one.name) for one in fields(Wish)}
    wish = Wish(**values)
    model = find_writer(options.run, options.allow_code, make_reporter(), best=options.best)
    write_wish(model, options.run, wish)
    return 0


def data(arguments: list[str]) -> int:
    """List the tasks and data sets, show samples of a task, or prepare real data."""
    import tyro

    @dataclass(frozen=True)
    class Data:
        """List tasks and data sets; show samples of a task; or prepare real data for training:
        mnist, tinystories, sketchy, or files of yours (text, a folder or zip of images, a .npy)."""

        name: tyro.conf.Positional[str] = ""
        """A task, a data set, or a path; nothing lists them all."""
        count: int = 2
        """How many samples of a task."""
        seed: int = 0
        """The same seed gives the same samples."""
        data_dir: Path | None = None
        """Where the files of a data set are, if they are not to be downloaded."""
        out: Path | None = None
        """Where the prepared data goes; data/NAME unless given."""
        overwrite: bool = False
        """Replace data prepared before."""
        option: dict[str, int | float | bool | str] = field(default_factory=dict)
        """Options of the preparation, for example: --option threshold 128 held_out 0.05."""

    options = _parse(Data, arguments, "memtrain data")

    from memtrain.recipes import RECIPES

    tasks = {make().data.kind: make().data for make in RECIPES.values()}
    tasks = {name: task for name, task in tasks.items() if name not in ("stream", "custom")}
    if not options.name:
        print("Tasks, made as they are learned (`memtrain data NAME` shows samples):")
        for name, config in tasks.items():
            print(f"  {name:<14}{(type(config).__doc__ or '').splitlines()[0]}")
        print("\nData sets (`memtrain data NAME --data-dir FOLDER` prepares them once):")
        for name in ("mnist", "tinystories", "sketchy"):
            print(f"  {name:<14}{(RECIPES[name].__doc__ or '').split(' (')[0]}")
        print("\nFiles of yours: memtrain data PATH, for text, images or a .npy of tokens.")
        return 0
    if options.name in tasks:
        return _show_samples(options.name, tasks[options.name], options.count, options.seed)
    return _prepare(options, tasks)


def _show_samples(name: str, config: Any, count: int, seed: int) -> int:
    if count < 1:
        raise MemtrainError(f"count={count}: must be at least 1")

    import torch

    from memtrain.data.build import build_task

    task = build_task(config)
    batch = task.sample(count, torch.Generator().manual_seed(seed))
    print(f"{name}: {task.sequence_length} tokens of {task.vocab_size}\n")
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        print(task.describe(inputs, targets), end="\n\n")
    return 0


def _prepare(options: Any, tasks: dict[str, Any]) -> int:
    from memtrain.data.sources import DATA_SETS, prepare, prepare_path

    name, path = options.name, Path(options.name)
    if name in DATA_SETS:
        out = options.out or Path("data") / name
        store = prepare(
            name,
            data_dir=options.data_dir,
            out=out,
            overwrite=options.overwrite,
            **options.option,
        )
    elif path.exists():
        out = options.out or Path("data") / path.name.split(".")[0]
        store = prepare_path(path, out, overwrite=options.overwrite, **options.option)
        name = "text" if store.meta.text else "images" if store.meta.picture else "tokens"
    else:
        raise MemtrainError(f"data {name!r}: no such file; {nearest(name, [*tasks, *DATA_SETS])}")
    for split, info in store.splits.items():
        print(f"{split:<6}{info.tokens:>14,} tokens in {info.documents:,} documents")
    for note in store.meta.notes:
        print(f"note  {note}")
    print(f"prepared {out}; learn it with: memtrain train {name} --data {out}")
    return 0


def bench(arguments: list[str]) -> int:
    """Time the training steps and generation on this machine."""
    import tyro

    @dataclass(frozen=True)
    class Bench:
        """Time SMT, DMT and BPTT steps and generation here: the fast path, and the same
        mathematics in plain PyTorch beside it."""

        suite: tyro.conf.Positional[Literal["smt", "dmt", "generate", "bptt", "all", "growth"]] = (
            "all"
        )
        """What to time; growth times all steps against length, memory tokens, width and batch."""
        size: Literal["auto", "paper", "tiny"] = "auto"
        """Models of the paper's size, or tiny ones; auto: the paper's on a GPU."""
        seconds: float = 3.0
        """How long each case is timed, on each path; at least three steps are."""
        device: str = "auto"
        """auto takes a GPU if there is one; else cpu, cuda, cuda:1, ..."""
        compile: bool = True
        """torch.compile the fast path, on a GPU."""
        reference: bool = True
        """Time the plain path too, where it differs: on a CPU it is the only one."""
        figure: Path = Path("growth.png")
        """Where growth draws its curves."""
        json: bool = False
        """Print one JSON object as the last line, nothing else on stdout."""

    options = _parse(Bench, arguments, "memtrain bench")
    if not options.seconds > 0:
        raise MemtrainError(f"seconds={options.seconds}: must be above 0")

    from memtrain.bench.cases import SUITES, cases, growth
    from memtrain.bench.measure import matrix_peak, measure, time_case
    from memtrain.bench.report import as_record, draw_growth, growth_record, print_results
    from memtrain.config import EngineConfig
    from memtrain.train.engine import pick_device

    device = pick_device(options.device)
    size = options.size if options.size != "auto" else "paper" if device.type == "cuda" else "tiny"
    compiled = options.compile and device.type == "cuda"
    engine = EngineConfig(device=options.device, compile=compiled)
    if options.suite == "growth":
        points = []
        for point in growth(size):
            print(f"{point.case.label}, {point.axis} {point.value}", file=sys.stderr)
            points.append((point, time_case(point.case, engine, options.seconds)))
        record = growth_record(points, engine, size)
        draw_growth(record, options.figure)
        print(json.dumps(record) if options.json else options.figure)
        return 0
    suites = SUITES if options.suite == "all" else [options.suite]
    todo = [case for suite in suites for case in cases(suite, size)]
    results = []
    for index, case in enumerate(todo):
        print(f"{index + 1}/{len(todo)}  {case.label}, batch {case.batch}", file=sys.stderr)
        results.append(measure(case, engine, options.seconds, options.reference))
    peak = matrix_peak(device)
    if options.json:
        print(json.dumps(as_record(results, engine, size, peak)))
    else:
        print_results(results, peak, device)
    return 0


def demo(arguments: list[str]) -> int:
    """SMT -> DMT against BPTT on the same cell."""

    @dataclass(frozen=True)
    class Demo:
        """Remember one token over many steps. The same cell is trained by SMT -> DMT and by BPTT
        (for the longer of equal steps and equal seconds); a table and a page tell."""

        folder: Path = Path("runs/demo")
        """Where the two runs and the page go; what a demo left there is replaced."""
        seed: int = 0
        """Everything random follows from this."""
        length: int = 32
        """Tokens in a sequence; the longer, the harder for BPTT."""

    options = _parse(Demo, arguments, "memtrain demo")

    from memtrain.demo import run_demo
    from memtrain.run import Interrupted
    from memtrain.train.metrics import make_reporter

    try:
        run_demo(options.folder, options.seed, options.length, make_reporter)
    except Interrupted:
        print("memtrain: stopped; the demo starts anew next time", file=sys.stderr)
        return 130
    return 0


def reproduce(arguments: list[str]) -> int:
    """Run a figure's grid, draw it, and say in numbers whether the paper's claim holds."""
    from memtrain.experiments import FIGURES

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: memtrain reproduce FIGURE|all [OPTIONS]\n\nFigures:")
        for name, title in FIGURES.items():
            print(f"  {name:<20}{title}")
        print(
            "\nFIGURE may also be a class of yours, my_file:MyFigure."
            "\nStart with `memtrain reproduce gradients` (seconds), then"
            "\n  memtrain reproduce all --scale smoke       all fifteen, minutes on a laptop"
            "\n  memtrain reproduce joint --scale cpu       minutes, small but real"
            "\n  memtrain reproduce synthetic --scale gpu   on a GPU, several runs at once"
            "\nWhat is done stays done: the same command goes on where it was stopped."
            "\n`memtrain reproduce FIGURE --help` lists the options."
        )
        return 0 if arguments else 2

    import tyro

    @dataclass(frozen=True)
    class Reproduce:
        """Run the grid of a figure, draw it, and say whether the paper's claim holds here.
        Finished runs are skipped, a stopped sweep goes on, a failed run does not stop the rest."""

        figure: tyro.conf.Positional[str]
        """A name from `memtrain reproduce`, all, or my_file:MyFigure."""
        scale: Literal["smoke", "cpu", "gpu", "paper"] = "smoke"
        """smoke: seconds, shows that it works; cpu: minutes to an hour; gpu: minutes of a large
        GPU; paper: the paper's sizes, days."""
        folder: Path | None = None
        """Where results, runs and pictures go; runs/reproduce-SCALE unless given."""
        launcher: Literal["local", "ray"] = "local"
        """Processes of this machine, or a Ray cluster whose machines all see the folder."""
        address: str = ""
        """Of the Ray cluster; without it one is started here."""
        processes: int | None = None
        """Runs at a time: as many as there are cores, or one on a GPU, unless given. Small runs
        share a GPU well; try 8."""
        data_dir: Path = Path("data")
        """Where `memtrain data` put mnist, tinystories and sketchy (scales gpu and paper)."""
        device: str = "auto"
        """auto takes a GPU if there is one; else cpu, cuda, cuda:1, ..."""
        json: bool = False
        """Print one JSON object of all verdicts as the last line of stdout, nothing else there."""

    options = _parse(Reproduce, arguments, "memtrain reproduce")
    if options.processes is not None and options.processes < 1:
        raise MemtrainError(f"processes={options.processes}: must be at least 1")

    from memtrain.experiments.command import run_reproduce

    return run_reproduce(options)


def report(arguments: list[str]) -> int:
    """One page of all that was reproduced."""
    import tyro

    @dataclass(frozen=True)
    class Report:
        """Write one HTML page, which needs nothing else: every figure that was reproduced, its
        verdict, seeds and spread, the cost, and each run with its curves and config."""

        folders: tyro.conf.Positional[tuple[Path, ...]] = ()
        """Folders that `memtrain reproduce` filled; all of runs/reproduce-* unless given."""
        out: Path | None = None
        """The page; report.html in the first folder unless given."""

    options = _parse(Report, arguments, "memtrain report")

    from memtrain.experiments.command import run_report

    return run_report(options.folders, options.out)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "generate": generate,
    "data": data,
    "bench": bench,
    "reproduce": reproduce,
    "report": report,
}

# --------------------------------------------------------------------------------------- helpers


def _open(folder: Path, allow_code: bool, best: bool = False) -> Any:
    from memtrain.run import Run
    from memtrain.train.metrics import make_reporter

    run = Run.open(folder, allow_code=allow_code, best=best, reporter=make_reporter())
    if not run.progress["stages"]:
        raise MemtrainError(f"{folder}: has no checkpoint yet; memtrain resume {folder} trains it")
    return run


def _peek(arguments: list[str], option: str) -> str | None:
    """The value of an option that has to be known before the others are parsed."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _parse(kind: type[Parsed], arguments: list[str], program: str) -> Parsed:
    """Parse with tyro; its boxed errors become one line, unknown options get the nearest name."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
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
        lines = [line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()]
        told = [line for line in lines if line and not line.startswith(("---", "For full"))]
        ending = next((i for i, line in enumerate(told) if line.startswith("Argument help")), None)
        message = " ".join(told[1:ending]).removeprefix("Error parsing ").rstrip(".")
        raise MemtrainError(f"{message}; see {program} --help") from None
    if unknown:
        known = _option_names(kind, parsed)
        guess = get_close_matches(unknown[0].replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f"did you mean {guess[0]}?" if guess else f"see {program} --help"
        raise MemtrainError(f"{unknown[0]}: no such option; {hint}")
    return parsed


def _option_names(kind: type, value: Any, prefix: str = "--") -> list[str]:
    names = []
    for one in fields(kind):
        inner = getattr(value, one.name)
        name = "" if one.name == "run" and is_dataclass(inner) else one.name.replace("_", "-")
        if is_dataclass(inner):
            names += _option_names(type(inner), inner, f"{prefix}{name}." if name else prefix)
        else:
            names.append(prefix + name)
    return names


if __name__ == "__main__":
    sys.exit(main())
