"""Several runs side by side: settings that differ, held-out losses, costs, and one figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Column, Table

from memtrain.config import RunConfig
from memtrain.errors import MemtrainError
from memtrain.plotting.style import COLOURS, GREY, log_x_axis, panels, short_ticks
from memtrain.runs.listing import RunSummary, make_frame, summarize
from memtrain.runs.run_folder import read_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS = {
    "total_steps": "steps",
    "total_tokens": "tokens",
    "total_sequential_ops": "sequential operations",
    "total_seconds": "training seconds",
}
"""Counters of a line of metrics, and their names in figures."""
LOG_X_RATIO = 20
"""An axis is logarithmic if the longest run is this many times as long as the shortest."""
STAGES = ("pretrain", "smt", "dmt", "bptt")
LEFT_OUT = ("name", "log", "version")
"""Settings that change no result."""


@dataclass(frozen=True)
class RunComparison:
    """Runs whose losses are in one unit, and what differs between them."""

    runs: list[RunSummary]
    names: list[str]
    """Short names, all different."""
    settings: dict[str, list[Any]]
    """The settings that differ, one value per run; None where a run has no such stage."""
    warnings: list[str] = field(default_factory=list)
    """Why the losses may not be comparable."""

    @property
    def loss(self) -> str:
        return self.runs[0].loss

    def rows(self) -> list[dict[str, Any]]:
        """One row per run: its name, the settings that differ, its losses and costs."""
        kept = ("data", "method", "cell", "parameters", "state", "rnn", "teacher", "best")
        kept += ("loss", "steps", "tokens", "sequential_ops", "seconds", "folder")
        return [
            {"run": name}
            | {key: values[at] for key, values in self.settings.items()}
            | {key: run.to_json()[key] for key in kept}
            for at, (name, run) in enumerate(zip(self.names, self.runs, strict=True))
        ]

    def figure(self) -> "Figure":
        """Held-out losses over steps, tokens, sequential operations and seconds."""
        curves = {name: run.records for name, run in zip(self.names, self.runs, strict=True)}
        return loss_figure(curves, self.loss, "; ".join(self.warnings))


class Comparison(NamedTuple):
    """The result of `compare`."""

    table: Any
    """A pandas DataFrame, one row per run."""
    figure: "Figure"
    """Held-out losses over steps, tokens, sequential operations and seconds."""
    warnings: list[str]
    """Why the losses may not be comparable; empty if they are."""


def compare(folders: Sequence[Path | str]) -> Comparison:
    """Compare runs: what differs in their settings, their held-out losses and their costs.

    Args:
        folders: at least two run folders.

    Raises:
        MemtrainError: a folder holds no run, a run has no held-out loss yet, or losses are in
            different units; pandas is missing.

    Example: `table, figure, warnings = memtrain.compare(["runs/a", "runs/b"])`
    """
    if isinstance(folders, str | Path):
        raise MemtrainError(f"folders={str(folders)!r}: must be a list of at least two run folders")
    compared = compare_runs([Path(folder) for folder in folders])
    table = make_frame(compared.rows())
    return Comparison(table, compared.figure(), compared.warnings)


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """`compare` without pandas and without drawing."""
    if len(folders) < 2:
        raise MemtrainError(
            f"runs={len(folders)}: name at least two run folders; memtrain runs lists them"
        )
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise MemtrainError(f"{folder}: given twice; leave one out")
    runs = [_summary(folder) for folder in folders]
    for run in runs[1:]:
        if run.loss != runs[0].loss:
            raise MemtrainError(
                f"{run.folder}: its losses are {run.loss}, those of {runs[0].folder} "
                f"{runs[0].loss}; compare runs whose losses are in the same unit"
            )
    configs = [run.config for run in runs if run.config is not None]
    return RunComparison(runs, _names(folders), differing_settings(configs), _warnings(runs))


def _summary(folder: Path) -> RunSummary:
    read_folder(folder)  # says what is there instead of a run
    run = summarize(folder)
    if run.problem:
        raise MemtrainError(f"{folder}: cannot be compared: {run.problem}")
    if not run.records:
        raise MemtrainError(
            f"{folder}: has no held-out loss yet; memtrain resume {folder} trains it, and "
            "log.evaluate_every sets how often it is evaluated"
        )
    return run


def _names(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths, as long as needed to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({one[-length:] for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]


def _warnings(runs: Sequence[RunSummary]) -> list[str]:
    found = []
    if len({run.identity for run in runs}) > 1:
        found.append("different data: the losses are not comparable")
    sizes = {(last["sequences"], last["length"]) for run in runs if (last := _evaluation(run))}
    if len(sizes) > 1:
        words = ", ".join(f"{count} of {length}" for count, length in sorted(sizes))
        found.append(f"evaluated on different numbers of held-out sequences ({words})")
    if going := [run.folder.name for run in runs if run.state == "running"]:
        found.append(f"still training: {', '.join(going)}")
    return found


def _evaluation(run: RunSummary) -> dict[str, Any]:
    found = run.records[-1]["evaluation"]
    return found if {"sequences", "length"} <= found.keys() else {}


def differing_settings(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Settings by dotted name that differ between runs.

    The settings of a stage are compared between the runs that have it.
    """
    flat = [_flat(asdict(config)) for config in configs]
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for one in flat for name in one):
        section = name.partition(".")[0]
        values = [one.get(name) for one in flat]
        if section in LEFT_OUT:
            continue
        if section in STAGES and not name.endswith(".steps"):
            present = [one[f"{section}.steps"] > 0 for one in flat]
            values = [
                value if there else None for value, there in zip(values, present, strict=True)
            ]
            if len({repr(value) for value in values if value is not None}) < 2:
                continue
        if len({repr(value) for value in values}) > 1:
            found[name] = values
    return found


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


# ------------------------------------------------------------------------------------- figure


def loss_figure(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    loss: str,
    title: str = "",
    levels: Mapping[str, float] | None = None,
    scale: float = 1.0,
) -> "Figure":
    """Draw held-out losses of several runs over each of `COSTS`.

    Args:
        curves: by name, evaluated lines of metrics; the RNN is a line, its teacher a thin one.
        loss: what losses are, as in "nats per character".
        title: above all panels.
        levels: losses of models that are not trained step by step, drawn as dotted lines.
        scale: losses are multiplied by this.
    """
    figure, grid = panels(2, 2, width=4.6, height=3.2, sharey=True)
    styles = [(colour, line) for line, colour in product(("-", "--", ":"), COLOURS[:-1])]
    for axes, (key, label) in zip(grid.flat, COSTS.items(), strict=True):
        for (name, records), (colour, line) in zip(curves.items(), cycle(styles), strict=False):
            for model in ("rnn", "teacher"):
                points = [
                    (one[key], one["evaluation"][model]["nats"] * scale)
                    for one in records
                    if one["evaluation"].get(model)
                ]
                if not points:
                    continue
                own = model == "rnn"
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    linestyle=line if own else (0, (1, 1)),
                    linewidth=1.8 if own else 0.9,
                    marker="." if own else "",
                    label=name if own else f"{name}, teacher",
                )
        for (name, level), style in zip((levels or {}).items(), cycle(("--", "-.", ":"))):
            axes.axhline(level, color=GREY, linestyle=style, linewidth=1, label=name)
        ends = [records[-1][key] for records in curves.values()]
        if min(ends) > 0 and max(ends) > LOG_X_RATIO * min(ends):
            log_x_axis(axes)
        else:
            short_ticks(axes)
        axes.set_xlabel(label)
        axes.tick_params(labelsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"held-out {loss}")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    columns = 3 if max(map(len, labels)) < 24 else 2
    place: dict[str, Any] = dict(loc="outside lower center", frameon=False)
    figure.legend(handles, labels, ncols=columns, fontsize=8, **place)
    if title:
        figure.suptitle(title, fontsize=9)
    return figure


# -------------------------------------------------------------------------------------- table


def short_count(count: int | float | None) -> str:
    """A count in at most five characters: 950, 12.3k, 4.1M."""
    if count is None:
        return "-"
    for suffix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            number = count / size
            return f"{number:.3g}{suffix}" if number < 999.5 else f"{number:.0f}{suffix}"
    return f"{count:.0f}"


def loss_text(nats: float | None) -> str:
    """A loss with three digits, or a dash."""
    return "-" if nats is None else f"{nats:.3f}"


def comparison_tables(compared: RunComparison) -> list[Table]:
    """Losses and costs of each run; below them, the settings that differ."""
    numbers = ("RNN", "teacher", "params", "steps", "tokens", "seq. ops", "seconds")
    columns = [Column(name, justify="right", no_wrap=True) for name in numbers]
    first = Table("run", *columns, title=f"held-out {compared.loss}")
    names = [f"{at}  {name}" for at, name in enumerate(compared.names, start=1)]
    for name, run in zip(names, compared.runs, strict=True):
        counts = (run.parameters, run.steps, run.tokens, run.sequential_ops)
        first.add_row(
            name,
            *map(loss_text, (run.rnn, run.teacher)),
            *map(short_count, counts),
            f"{run.seconds:,.0f}",
        )
    heads = [Column(str(at), overflow="fold") for at, _ in enumerate(names, start=1)]
    second = Table("setting", *heads, title="settings that differ")
    for name, values in compared.settings.items():
        second.add_row(name, *("-" if value is None else str(value) for value in values))
    return [first, second] if compared.settings else [first]
