"""`memtrain report`: one HTML page of figures, verdicts, statistics over seeds, and runs."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from memtrain import __version__
from memtrain.config.serialize import to_json
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, write_output
from memtrain.paper import is_own, load
from memtrain.paper.base import Result, Tag
from memtrain.paper.plots import grey, show_images
from memtrain.paper.reproduce import Outcome, errors_of, open_folder, outcome
from memtrain.paper.results import COSTS, ResultsFile
from memtrain.plotting import html
from memtrain.plotting.style import panels, render_figure

SMOKE = (
    "The scale smoke trains tiny models for a dozen steps. It shows that every figure runs and is "
    "drawn, but not whether the paper's claims hold; the smallest scale that does is --scale cpu."
)


@dataclass(frozen=True, slots=True)
class Report:
    """A page, and the figures that it omits because they would have to be imported."""

    html: str
    left_out: list[str]


def run_report(folders: Sequence[Path], out: Path | None, allow_code: bool) -> int:
    """Run the command: write the page and print its address."""
    if not folders:
        folders = sorted(path.parent for path in Path("runs").glob("reproduce-*/setup.json"))
    if not folders:
        raise MemtrainError(
            "nothing to report: no runs/reproduce-* here; memtrain reproduce all makes one"
        )
    page = out or folders[0] / "report.html"
    if out is None:
        refuse_links(page, folders[0])
    report = make_report(folders, allow_code=allow_code)
    write_output(page, report.html.encode())
    for name in report.left_out:
        print(f"left out {name}: --allow-code imports it, if you trust it", file=sys.stderr)
    print(page.resolve().as_uri())
    return 0


def make_report(folders: Sequence[Path], *, allow_code: bool = False) -> Report:
    """Make the page of one or more folders of `memtrain reproduce`.

    Args:
        folders: with setup.json and results.jsonl.
        allow_code: import the users' classes that a folder names; otherwise they are left out.

    Raises:
        MemtrainError: a folder is damaged, or no figure remains.
    """
    parts: list[html.Part] = []
    summary: list[list[Any]] = []
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    scales: list[str] = []
    for folder in folders:
        setup, names = open_folder(folder)
        scales.append(setup.scale)
        results = ResultsFile(folder).by_id()
        left_out += [name for name in names if is_own(name) and not allow_code]
        for figure in [load(name) for name in names if allow_code or not is_own(name)]:
            one = outcome(figure, setup, figure.grid(setup), results)
            title = f"{figure.title} ({figure.name}, {setup.scale})"
            runs = f"{len(one.results)} of {len(one.jobs)}" if one.missing else len(one.results)
            seconds = round(sum((result.cost["seconds"] for result in one.results), 0.0), 1)
            summary.append([title, one.verdict.word, runs, seconds])
            with errors_of(figure, folder):
                parts += _figure(one, title)
            outcomes.append(one)
    if not outcomes:
        reason = f"{left_out[0]} would be imported; " if left_out else ""
        remedy = "--allow-code imports it, if you trust it" if left_out else "it names no figure"
        raise MemtrainError(f"{folders[0]}: nothing to report: {reason}{remedy}")
    title, lead = _headline(outcomes, list(dict.fromkeys(scales)))
    notes: list[html.Part] = [html.Notice(text=SMOKE)] if "smoke" in scales else []
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        notes.append(
            html.Text(text=f"Left out, because a report does not import a folder's code: {names}.")
        )
    table = html.Table(header=["figure", "the claim", "runs", "training seconds"], rows=summary)
    footer = f"memtrain {__version__}. Results: {', '.join(str(folder) for folder in folders)}"
    return Report(html.render_page(title, lead, [*notes, table, *parts], footer), left_out)


def _headline(outcomes: Sequence[Outcome], scales: Sequence[str]) -> tuple[str, str]:
    """Title and lead."""
    count = f"{len(outcomes)} {'table or figure' if len(outcomes) == 1 else 'tables and figures'}"
    if scales == ["smoke"]:
        title = "A smoke test of the paper's figures: too small to judge any claim"
        return title, (
            f"{count} at the scale smoke, each with the paper's claim, the plot and the runs "
            "behind it."
        )
    judged = [one.verdict.holds for one in outcomes if one.verdict.holds is not None]
    title = f"The paper's figures, reproduced at the scale {' and '.join(scales)}"
    return title, (
        f"{count}, each with the paper's claim, whether it holds here, and the runs behind it. "
        f"Of {len(judged)} claims judged here, {sum(judged)} hold and "
        f"{len(judged) - sum(judged)} do not; {len(outcomes) - len(judged)} are not judged."
    )


def _figure(found: Outcome, title: str) -> Iterator[html.Part]:
    yield html.Heading(text=title)
    yield html.Text(text=f"The paper: {found.figure.claim}")
    yield html.Text(text=f"Here: {found.verdict.word}. {found.verdict.sentence}")
    if found.picture is not None:
        seeds = {result.tags["seed"] for result in found.results if "seed" in result.tags}
        listed = f" Seeds: {', '.join(map(str, sorted(seeds, key=str)))}." if seeds else ""
        caption = f"{found.figure.title}.{listed}"
        yield html.Figure(png_bytes=found.picture.read_bytes(), caption=caption)
    table = summary_table(found.results)
    if table is not None:
        yield html.Fold(
            summary="Means and standard deviations over seeds, and costs", parts=[table]
        )
    if found.results:
        configs = {(job.key, job.name): to_json(job.config) for job in found.jobs}
        runs = [_run(result, configs[result.key, result.job]) for result in found.results]
        yield html.Fold(summary=f"Individual runs: {len(runs)}", parts=runs)


def summary_table(results: Sequence[Result]) -> html.Table | None:
    """One row per setting: mean ± standard deviation over seeds of every measured number."""
    groups: dict[tuple[tuple[str, Tag], ...], list[Result]] = {}
    for result in results:
        setting = tuple((name, tag) for name, tag in result.tags.items() if name != "seed")
        groups.setdefault(setting, []).append(result)
    names = list(
        dict.fromkeys(
            name
            for result in results
            for name, value in result.measured.items()
            if isinstance(value, int | float)
        )
    )
    if not names:
        return None
    rows = []
    for setting, group in groups.items():
        label = ", ".join(f"{name} {value}" for name, value in setting) or "the run"
        cells = [_mean_and_deviation([r.measured.get(name) for r in group]) for name in names]
        costs = [fmean(r.cost[name] for r in group) for name in COSTS]
        rows.append([label, len(group), *cells, *(round(c) if c > 100 else c for c in costs)])
    header = ["setting", "runs", *(name.replace("_", " ") for name in names)]
    header += [name.replace("_ops", " operations") for name in COSTS]
    return html.Table(
        header=header, rows=rows, note="± is the standard deviation over seeds; costs are means."
    )


def _mean_and_deviation(values: Sequence[int | float | None]) -> str | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    deviation = f" ± {np.std(known, ddof=1):.2g}" if len(known) > 1 else ""
    return f"{np.mean(known):.4g}{deviation}"


# ----------------------------------------------------------------------------------- one run


def _run(result: Result, config: str) -> html.Fold:
    parts: list[html.Part] = []
    if result.diverged:
        parts.append(html.Text(text=f"Training stopped early: {result.diverged}"))
    parts.append(_numbers(result))
    if len(result.curve) > 1:
        parts.append(html.Columns(parts=[_curve(result, "nats"), _curve(result, "accuracy")]))
    samples = _samples(result)
    if samples is not None:
        parts.append(samples)
    parts.append(html.Fold(summary="Config", parts=[html.Code(text=config)]))
    return html.Fold(summary=result.job, parts=parts)


def _numbers(result: Result) -> html.Table:
    numbers = {k: v for k, v in result.measured.items() if isinstance(v, int | float | str)}
    rows: list[list[Any]] = [[name.replace("_", " "), value] for name, value in numbers.items()]
    rows += [[name.replace("_ops", " operations"), value] for name, value in result.cost.items()]
    return html.Table(header=["measured", "value"], rows=rows)


def _curve(result: Result, what: str) -> html.Chart:
    series = [
        html.Series(
            name=name,
            x=[point["steps"] for point in points],
            y=[point[f"{model}_{what}"] for point in points],
            emphasised=model == "rnn",
            muted=model == "teacher",
        )
        for model, name in (("rnn", "RNN"), ("teacher", "teacher"))
        if (points := [point for point in result.curve if f"{model}_{what}" in point])
    ]
    stages = " → ".join(dict.fromkeys(point["stage"] for point in result.curve))
    title = f"Held-out {what}"
    return html.Chart(title=title, x_label="steps", y_label=what, series=series, note=stages)


def _samples(result: Result) -> html.Figure | None:
    """Images generated by this run, if its figure stored any."""
    album = result.measured.get("album")
    if not isinstance(album, dict) or "samples" not in album:
        return None
    drawn, axes = panels(1, 1, width=7.0, height=1.9)
    show_images(axes[0, 0], grey(album, "samples")[:16], "")
    return html.Figure(
        png_bytes=render_figure(drawn), caption=f"Generated by this run: {result.job}"
    )
