"""memtrain resume, and what a command line changes of the run that it continues."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import HELP, Option, check_names, options_of, parse, parse_known, show_help
from memtrain.config import LabelFile, RunConfig, Series
from memtrain.errors import MemtrainError
from memtrain.recipes import recipe
from memtrain.runs.changes import KEEPS, differences


@dataclass(frozen=True)
class _ResumeOptions:
    """Continue a stopped run. The result equals that of a run that was never stopped, to the bit,
    unless a stage has a time limit. Options of the config lengthen or change it: --smt.steps 2000
    trains a run, also a finished one, up to 2000 steps of SMT (docs/TRAINING.md)."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    allow_code: bool = False
    """Import your own cell, task or optimizer class that the run's config names."""
    track: str = ""
    """Also send the metrics to tensorboard, wandb or trackio, several as a,b. The run keeps the
    trackers that it had; none turns them off."""
    after_save: str = ""
    """Run this command after each checkpoint, as of memtrain train."""


def resume(arguments: list[str]) -> int:
    """Continue a stopped run with its own config, or lengthen it."""
    program, own_options = "memtrain resume", options_of(_ResumeOptions)
    if HELP & {*arguments}:
        show_help(program, _ResumeOptions.__doc__ or "", own_options)
    anything = own_options + _config_options(recipe("retrieval"))
    check_names([one for one in arguments if not one.startswith("--data.")], anything, program)
    options, overrides = parse_known(_ResumeOptions, arguments, own_options, program)

    from memtrain.cli.train import train_and_evaluate
    from memtrain.runs.distributed import join
    from memtrain.runs.run_folder import read_folder
    from memtrain.training.after_save import AfterSave
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run
    from memtrain.training.trackers import make_trackers

    config = read_folder(options.run)
    known = own_options + _config_options(config)
    changed = parse(RunConfig, overrides, program, known, config)
    changes = {key: given for key, given, _ in differences(changed, config)}
    reporter, trackers = make_reporter(), make_trackers(options.track, options.run)
    hooks = [AfterSave(options.after_save, reporter.say)] if options.after_save else []
    run = Run.open(
        options.run,
        allow_code=options.allow_code,
        changes=changes,
        reporter=reporter,
        group=join(),
    )
    if run.finished:
        run.group.leave()
        if run.group.main:
            print(f"{options.run}: finished already; see it with: memtrain eval {options.run}")
            if unused := ", ".join(f"{name}={value}" for name, value in changes.items()):
                print(f"not changed, because no step is left: {unused}")
            print(f"train it longer with: memtrain resume {options.run} --{_longer(run)}")
        return 0
    return train_and_evaluate(run, reporter, trackers, hooks)


def _config_options(config: RunConfig) -> list[Option]:
    """The options of a config; a run that continues has its own weights."""
    return [one for one in options_of(RunConfig, config) if one.name != "--initial"]


def _longer(run: Any) -> str:
    """An option that would lengthen a finished run."""
    done = run.progress.stages[-1]
    stage = run.config.stages()[done.name]
    if done.steps < stage.steps and stage.seconds:
        return f"{done.name}.seconds {2 * stage.seconds:g}"
    if done.steps < stage.steps and stage.patience and done.since_lowest >= stage.patience:
        return f"{done.name}.patience {2 * stage.patience}"
    return f"{done.name}.steps {2 * stage.steps}"


def changes_of(
    name: str, options: Any, config: RunConfig, own: RunConfig, configure: Any
) -> dict[str, Any]:
    """The fields in which `memtrain train NAME --resume` differs from the run in the folder.

    Args:
        name: the recipe, or a config.json.
        options: that choose the recipe.
        config: what the command line would make.
        own: the run's config.
        configure: changes the fields of a config that the other options name.

    Raises:
        MemtrainError: the command line is of other data or models than the run.
    """
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
    if options.data:
        _check_same_data(", ".join(map(str, options.data)), config.data, own.data)
    return {key: given for key, given, _ in differences(configure(own), own)}


def _check_same_data(source: str, prepared: Any, own: Any) -> None:
    """Refuse to resume if the stream prepared from --data is not the run's own."""
    from memtrain.data.store import identity_of
    from memtrain.data.store_reader import open_store

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
