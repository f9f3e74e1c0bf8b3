"""memtrain eval."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, strict_json, write_atomic


@dataclass(frozen=True)
class _EvaluateOptions:
    """Evaluate a run on held-out sequences: loss and accuracy of the teacher, and of the RNN from
    the empty memory and from the teacher's, overall and by position; the drift between their
    memories; n-gram baselines on the same targets; and the cost of training. Of a series also
    forecasts from held-out origins, against naive ones. Figures and their numbers go to
    RUN/figures."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    sequences: int | None = None
    """Held-out sequences, at most as many as the data has (default: a few seconds' worth)."""
    length: int | None = None
    """Tokens per held-out sequence of a stream (default: data.evaluate_length). Sequences longer
    than the training windows show whether the RNN generalizes: 1568 (two MNIST images), 4096
    (text)."""
    data: Path | None = None
    """Evaluate on the held-out part of other data with the same tokens: prepared data, such as the
    test part of enwik8, or a file or folder, which is prepared with the run's tokenizer."""
    horizon: int | None = None
    """Steps to forecast of a series (default: a season, else a quarter of the window)."""
    origins: int | None = None
    """Held-out places of a series where forecasts start (default: 64)."""
    json: bool = False
    """Print one JSON object as the last line of stdout, and nothing else there."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell or task class that the run's config names."""


def evaluate(arguments: list[str]) -> int:
    """Losses, accuracy, drift and cost of a run."""
    options = parse(_EvaluateOptions, arguments, "memtrain eval")

    from memtrain.generation.pretrained import pretrained_names
    from memtrain.plotting.figures import save_evaluation_figure, save_training_figure
    from memtrain.plotting.forecasts import save_forecast_figure
    from memtrain.plotting.tables import print_evaluation, print_forecasts
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run

    if str(options.run) in pretrained_names() and not options.run.exists():
        raise MemtrainError(
            f"{options.run}: is a pretrained model without data or teacher; memtrain generate "
            f"{options.run} uses it, memtrain train {options.run} makes a run to evaluate"
        )
    run = Run.open(
        options.run, allow_code=options.allow_code, best=options.best, reporter=make_reporter()
    )
    if not run.progress.stages:
        raise MemtrainError(
            f"{options.run}: has no checkpoint yet; memtrain resume {options.run} trains it"
        )
    _check_forecasts(options, of_numbers=run.task.values is not None)
    flags: dict[str, Any] = {"length": options.length, "data": options.data}
    result = run.evaluate(options.sequences, **flags, baselines=True)
    forecasts = None
    if run.task.values is not None:
        try:
            forecasts = run.evaluate_forecasts(options.horizon, origins=options.origins or 64)
        except MemtrainError as error:
            raise MemtrainError(str(error).replace("horizon=", "--horizon ", 1)) from None
    record = {
        "run": str(options.run),
        "seed": run.config.seed,
        "best": options.best,
        "step": run.progress.global_step,
        "unit": run.task.unit,
        **({"data": str(options.data)} if options.data is not None else {}),
        **result.to_json(),
        **({"forecasts": forecasts.to_json()} if forecasts is not None else {}),
        "stages": run.progress.stages_json(),
        **run.totals(),
    }
    text = strict_json(record)
    best = "-best" if options.best else ""
    best += f"-{options.data.resolve().name}" if options.data is not None else ""
    figure = options.run / "figures" / f"evaluation-{result.length}{best}.png"
    training = figure.with_name("training.png")
    ahead = figure.with_name(f"forecasts-{forecasts.horizon if forecasts else 0}{best}.png")
    for path in (figure, figure.with_suffix(".json"), training, ahead):
        refuse_links(path, options.run)
    if options.json:
        print(text, flush=True)
    else:
        print_evaluation(result, run)
        if forecasts is not None:
            print_forecasts(forecasts, run.config.name)
    try:
        save_evaluation_figure(result, figure, run.config.name, run.task.unit)
        write_atomic(figure.with_suffix(".json"), (text + "\n").encode())
        labels = (run.config.name, run.task.unit, run.task.loss_name)
        save_training_figure(run.metrics.read(), training, *labels)
        if forecasts is not None:
            save_forecast_figure(
                forecasts.examples, ahead, forecasts.columns, f"{run.config.name}: held-out origins"
            )
    except OSError as error:
        raise MemtrainError(f"no figures: {error.filename}: {error.strerror}") from None
    if not options.json:
        drawn = ", ".join(path.name for path in (figure, training, ahead) if path.exists())
        print(f"figures in {figure.parent}: {drawn}")
    return 0


def _check_forecasts(options: _EvaluateOptions, *, of_numbers: bool) -> None:
    """Refuse options of forecasts that are out of range, or of a run without numbers."""
    for name in ("horizon", "origins"):
        number = getattr(options, name)
        if number is not None and not of_numbers:
            raise MemtrainError(
                f"--{name}: {options.run} predicts tokens; forecasts are for runs of a series"
            )
        if number is not None and number < 1:
            raise MemtrainError(f"--{name}={number}: must be at least 1")
