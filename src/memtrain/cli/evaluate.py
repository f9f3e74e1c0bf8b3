"""memtrain eval."""

from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, strict_json, write_atomic


@dataclass(frozen=True)
class _EvaluateOptions:
    """Evaluate a run on held-out sequences: loss and accuracy of the teacher, and of the RNN from
    the empty memory and from the teacher's, overall and by position; the drift between their
    memories; n-gram baselines on the same targets; and the cost of training. A figure, its numbers
    and the training curves go to RUN/figures."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    sequences: int | None = None
    """Held-out sequences, at most as many as the data has (default: a few seconds' worth)."""
    length: int | None = None
    """Tokens per held-out sequence of a stream (default: data.evaluate_length). Sequences longer
    than the training windows show whether the RNN generalizes: 1568 (two MNIST images), 4096
    (text)."""
    json: bool = False
    """Print one JSON object as the last line of stdout, and nothing else there."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell or task class that the run's config names."""


def evaluate(arguments: list[str]) -> int:
    """Losses, accuracy, drift and cost of a run."""
    options = parse(_EvaluateOptions, arguments, "memtrain eval")

    from memtrain.plotting.figures import save_evaluation_figure, save_training_figure
    from memtrain.plotting.tables import print_evaluation
    from memtrain.training.console import make_reporter
    from memtrain.training.run import Run

    run = Run.open(
        options.run, allow_code=options.allow_code, best=options.best, reporter=make_reporter()
    )
    if not run.progress.stages:
        raise MemtrainError(
            f"{options.run}: has no checkpoint yet; memtrain resume {options.run} trains it"
        )
    result = run.evaluate(options.sequences, length=options.length, baselines=True)
    record = {
        "run": str(options.run),
        "seed": run.config.seed,
        "best": options.best,
        "step": run.progress.global_step,
        "unit": run.task.unit,
        **asdict(result),
        "stages": run.progress.stages_json(),
        **run.totals(),
    }
    text = strict_json(record)
    best = "-best" if options.best else ""
    figure = options.run / "figures" / f"evaluation-{result.length}{best}.png"
    training = figure.with_name("training.png")
    for path in (figure, figure.with_suffix(".json"), training):
        refuse_links(path, options.run)
    if options.json:
        print(text, flush=True)
    else:
        print_evaluation(result, run)
    try:
        save_evaluation_figure(result, figure, run.config.name, run.task.unit)
        write_atomic(figure.with_suffix(".json"), (text + "\n").encode())
        save_training_figure(run.metrics.read(), training, run.config.name, run.task.unit)
    except OSError as error:
        raise MemtrainError(f"no figures: {error.filename}: {error.strerror}") from None
    if not options.json:
        drawn = ", ".join(path.name for path in (figure, training) if path.exists())
        print(f"figures in {figure.parent}: {drawn}")
    return 0
