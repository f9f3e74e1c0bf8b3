"""memtrain eval."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from memtrain.cli.args import open_run, parse
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, strict_json, write_atomic


def evaluate(arguments: list[str]) -> int:
    """Losses, accuracy, drift and cost of a run."""
    import tyro

    @dataclass(frozen=True)
    class Evaluate:
        """Score a run on held-out sequences: teacher, RNN from the empty memory and from the
        teacher's, over the whole sequence and against the position in it; how far their memories
        drift apart; count models on the same targets; and what training cost. A figure, its
        numbers and the curves of the training go to RUN/figures."""

        run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
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

    options = parse(Evaluate, arguments, "memtrain eval")

    from memtrain.plotting.curves import save_evaluation_figure, save_training_figure
    from memtrain.plotting.tables import print_evaluation

    run = open_run(options.run, options.allow_code, options.best)
    result = run.evaluate(options.sequences, length=options.length, baselines=True)
    looked_at = {"best": options.best, "step": run.progress["global_step"]}
    record = {"run": str(options.run), "seed": run.config.seed, **looked_at}
    record |= {"unit": run.task.unit, **asdict(result)}
    text = strict_json(record | {"stages": run.progress["stages"], **run.totals()})
    best = "-best" if options.best else ""
    figure = options.run / "figures" / f"evaluation-{result.length}{best}.png"
    training = figure.with_name("training.png")
    for path in (figure, figure.with_suffix(".json"), training):
        refuse_links(path, options.run)
    if options.json:
        print(text, flush=True)
    else:
        print_evaluation(
            result, run.config.name, run.task.unit, run.progress["stages"], run.metrics.read
        )
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
