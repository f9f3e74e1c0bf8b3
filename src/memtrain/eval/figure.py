"""An evaluation as a figure: losses and drift against the position in the sequence."""

from pathlib import Path

from memtrain.eval.evaluate import Evaluation

INK = {"teacher": "#444444", "rnn": "#1f6fb4", "rnn_from_teacher": "#d65d0e"}
LABEL = {
    "teacher": "teacher",
    "rnn": "RNN, empty memory",
    "rnn_from_teacher": "RNN, teacher's memory",
}


def save_figure(result: Evaluation, path: Path, name: str, unit: str) -> None:
    """Draw the losses of teacher and RNN by position, and below them the drift, 1-R²."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = result.by_position
    ends = zip(curves.edges[:-1], curves.edges[1:], strict=True)
    middles = [(first + end - 1) / 2 for first, end in ends]
    drawn = curves.unexplained is not None
    figure = Figure(figsize=(7, 6.4 if drawn else 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if drawn else 1, 1, sharex=True, squeeze=False)[:, 0]
    for key, colour in INK.items():
        values = getattr(curves, key)
        if values is None:
            continue
        points = [(x, y) for x, y in zip(middles, values, strict=True) if y is not None]
        if points:
            axes[0].plot(*zip(*points, strict=True), color=colour, label=LABEL[key], marker=".")
    for style, baseline in zip((":", "-.", "--"), result.baselines, strict=False):
        axes[0].axhline(
            baseline.nats, color="#999999", linestyle=style, linewidth=1, label=baseline.name
        )
    axes[0].set_ylabel(f"nats a {unit}")
    axes[0].set_ylim(bottom=0)
    axes[0].set_title(f"{name}: {result.sequences} held-out sequences", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if curves.unexplained is not None:
        axes[1].plot(middles, curves.unexplained, color=INK["rnn"], marker=".")
        axes[1].set_ylabel("drift of the memory, 1-R²")
        axes[1].set_ylim(bottom=0)
    axes[-1].set_xlabel("position in the sequence")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
