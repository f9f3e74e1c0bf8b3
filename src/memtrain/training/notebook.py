"""A run in a notebook: its curves, and a table of its stages."""

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

from memtrain.errors import MemtrainError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memtrain.training.run import Run


def plot(run: "Run") -> "Figure":
    """The training curves as a matplotlib Figure: losses per stage, and held-out losses."""
    from memtrain.plotting.figures import training_figure

    records = run.metrics.read()
    if not records:
        raise MemtrainError(f"{run.folder}: has no metrics to plot yet; call run.train() first")
    return training_figure(records, run.config.name, run.task.unit, run.task.loss_name)


def png(run: "Run") -> bytes | None:
    """The training curves; None if there are none yet."""
    from memtrain.plotting.style import render_figure

    return render_figure(plot(run)) if run.metrics.read() else None


def html(run: "Run") -> str:
    """A table of the stages above the training curves."""
    rows, done = "", {stage.name: stage for stage in run.progress.stages}
    for name in run.stages:
        steps = run.config.stages()[name].steps
        found = done.get(name)
        counts = f"{found.steps:,}" if found else "0", f"{found.tokens:,}" if found else "0"
        seconds = f"{found.seconds:.1f}" if found else "0"
        cells = (f"{counts[0]} of {steps:,}", counts[1], seconds)
        rows += f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    title = escape(f"{run.config.name} in {run.folder}")
    heads = "".join(f"<th>{head}</th>" for head in (title, "steps", "tokens", "seconds"))
    curves = png(run)
    image = f'<img src="data:image/png;base64,{b64encode(curves).decode()}">' if curves else ""
    return f"<table><tr>{heads}</tr>{rows}</table>{image}"
