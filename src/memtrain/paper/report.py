"""One HTML page of everything reproduced: figures, verdicts, seeds and spread, single runs."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrain import __version__
from memtrain.config.serialize import to_json
from memtrain.errors import MemtrainError
from memtrain.files import refuse_links, write_output
from memtrain.paper import is_own
from memtrain.paper.base import Result, Tag
from memtrain.paper.plots import grey, strip
from memtrain.paper.reproduce import Outcome, blaming, open_folder, outcome
from memtrain.plotting.html import (
    Chart,
    Code,
    Columns,
    Figure,
    Fold,
    Heading,
    Notice,
    Part,
    Series,
    Table,
    Text,
    render_page,
)
from memtrain.plotting.style import panels, render_figure

SEED_TAGS = ("seed",)
SMOKE = (
    "The scale smoke trains tiny models for a dozen steps. It shows that every figure is run and "
    "drawn, and says nothing about the paper's claims; --scale cpu is the smallest that judges."
)


@dataclass(frozen=True, slots=True)
class Report:
    """A page, and the figures that it leaves out because they would have to be imported."""

    html: str
    left_out: list[str]


def make_report(folders: Sequence[Path], *, allow_code: bool = False) -> Report:
    """The page of one or more folders that `memtrain reproduce` filled.

    Args:
        folders: with setup.json and results.jsonl.
        allow_code: import the classes of figures that a folder names; else they are left out.

    Raises:
        MemtrainError: a folder is damaged, or no figure is left.
    """
    parts: list[Part] = []
    summary: list[list[Any]] = []
    found: list[Outcome] = []
    left_out: list[str] = []
    scales: list[str] = []
    for folder in folders:
        setup, names = open_folder(folder)
        scales.append(setup.scale)
        for name in names:
            if is_own(name) and not allow_code:
                left_out.append(name)
                continue
            one = outcome(name, setup)
            title = f"{one.figure.title} ({one.figure.name}, {setup.scale})"
            summary.append([title, one.verdict.word, _runs(one), _seconds(one)])
            with blaming(one.figure, folder):
                parts += _figure(one, title)
            found.append(one)
    if not found:
        reason = f"{left_out[0]} would be imported; " if left_out else ""
        remedy = "--allow-code imports it, if you trust it" if left_out else "it names no figure"
        raise MemtrainError(f"{folders[0]}: nothing to report: {reason}{remedy}")
    title, lead, notice = _headline(found, list(dict.fromkeys(scales)))
    header = ["figure", "the claim", "runs", "training seconds"]
    if left_out:
        said = f"Left out, since memtrain report imports no code of a folder: {_listed(left_out)}."
        notice.append(Text(text=said))
    page = render_page(
        title,
        lead,
        [*notice, Table(header=header, rows=summary), *parts],
        f"memtrain {__version__}. Results: {', '.join(str(folder) for folder in folders)}",
    )
    return Report(page, left_out)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _headline(found: Sequence[Outcome], scales: Sequence[str]) -> tuple[str, str, list[Part]]:
    """Title, lead and notice: what was judged, and first of all what is too small for it."""
    count = f"{len(found)} {'table or figure' if len(found) == 1 else 'tables and figures'}"
    if scales == ["smoke"]:
        title = "A smoke test of the paper's figures: too small to judge any claim"
        lead = (
            f"{count} at the scale smoke, each with the paper's claim, the picture and the runs "
            "behind it."
        )
        return title, lead, [Notice(text=SMOKE)]
    judged = [one.verdict.holds for one in found if one.verdict.holds is not None]
    title = f"The paper's figures, reproduced at the scale {' and '.join(scales)}"
    lead = (
        f"{count}, each with the paper's claim, whether it holds here, and the runs behind it. "
        f"Of {len(judged)} claims judged here, {sum(judged)} hold and "
        f"{len(judged) - sum(judged)} do not; {len(found) - len(judged)} are not judged."
    )
    return title, lead, [Notice(text=SMOKE)] if "smoke" in scales else []


def _runs(found: Outcome) -> str:
    done, all_jobs = len(found.results), len(found.jobs)
    return f"{done}" if found.complete else f"{done} of {all_jobs}"


def _seconds(found: Outcome) -> float:
    return round(sum((result.cost["seconds"] for result in found.results), 0.0), 1)


def _figure(found: Outcome, title: str) -> Iterator[Part]:
    yield Heading(text=title)
    yield Text(text=f"The paper: {found.figure.claim}")
    yield Text(text=f"Here: {found.verdict.word}. {found.verdict.sentence}")
    if found.picture is not None:
        caption = f"{found.figure.title}. {_seeds(found)}"
        yield Figure(png_bytes=found.picture.read_bytes(), caption=caption)
    table = summary_table(found.results)
    if table is not None:
        yield Fold(summary="Means and spread over seeds, and what they cost", parts=[table])
    if found.results:
        yield Fold(
            summary=f"Runs, one by one: {len(found.results)}",
            parts=[_run(found, result) for result in found.results],
        )


def _seeds(found: Outcome) -> str:
    seeds = {result.tags["seed"] for result in found.results if "seed" in result.tags}
    return f"Seeds: {', '.join(map(str, sorted(seeds, key=str)))}." if seeds else ""


def summary_table(results: Sequence[Result]) -> Table | None:
    """A row for each setting: mean ± standard deviation over seeds of every measured number."""
    groups: dict[tuple[tuple[str, Tag], ...], list[Result]] = {}
    for result in results:
        place = tuple((k, v) for k, v in result.tags.items() if k not in SEED_TAGS)
        groups.setdefault(place, []).append(result)
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
    costs = ("steps", "tokens", "sequential_ops", "seconds")
    rows = []
    for place, group in groups.items():
        label = ", ".join(f"{name} {value}" for name, value in place) or "the run"
        cells = [_mean_spread([r.measured.get(name) for r in group]) for name in names]
        spent = [_mean([r.cost[name] for r in group]) for name in costs]
        rows.append([label, len(group), *cells, *spent])
    header = ["setting", "runs", *(name.replace("_", " ") for name in names)]
    header += ["steps", "tokens", "sequential operations", "seconds"]
    return Table(
        header=header, rows=rows, note="± is the standard deviation over seeds; costs are means."
    )


def _mean(values: Sequence[int | float]) -> int | float:
    average = sum(values) / len(values)
    return round(average) if average > 100 else average


def _mean_spread(values: Sequence[int | float | None]) -> str | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    average = sum(known) / len(known)
    if len(known) < 2:
        return f"{average:.4g}"
    around = (sum((value - average) ** 2 for value in known) / (len(known) - 1)) ** 0.5
    return f"{average:.4g} ± {around:.2g}"


# ----------------------------------------------------------------------------------- one run


def _run(found: Outcome, result: Result) -> Fold:
    config = next(job.config for job in found.jobs if (job.key, job.name) == _place(result))
    parts: list[Part] = []
    if result.diverged:
        parts.append(Text(text=f"Training stopped early: {result.diverged}"))
    parts.append(_numbers(result))
    if len(result.curve) > 1:
        parts.append(Columns(parts=[_curve(result, "nats"), _curve(result, "accuracy")]))
    samples = _samples(result)
    if samples is not None:
        parts.append(samples)
    parts.append(Fold(summary="Config", parts=[Code(text=to_json(config))]))
    return Fold(summary=result.job, parts=parts)


def _place(result: Result) -> tuple[str, str]:
    return result.key, result.job


def _numbers(result: Result) -> Table:
    numbers = {k: v for k, v in result.measured.items() if isinstance(v, int | float | str)}
    rows: list[list[Any]] = [[name.replace("_", " "), value] for name, value in numbers.items()]
    rows += [[name.replace("_ops", " operations"), value] for name, value in result.cost.items()]
    return Table(header=["measured", "value"], rows=rows)


def _curve(result: Result, what: str) -> Chart:
    series = []
    for model, name in (("rnn", "RNN"), ("teacher", "teacher")):
        points = [point for point in result.curve if f"{model}_{what}" in point]
        if points:
            series.append(
                Series(
                    name=name,
                    x=[point["steps"] for point in points],
                    y=[point[f"{model}_{what}"] for point in points],
                    emphasised=model == "rnn",
                    muted=model == "teacher",
                )
            )
    stages = list(dict.fromkeys(point["stage"] for point in result.curve))
    title = "Held-out nats" if what == "nats" else "Held-out accuracy"
    return Chart(title=title, x_label="steps", y_label=what, series=series, note=" → ".join(stages))


def _samples(result: Result) -> Figure | None:
    """The pictures that this run drew, if its figure kept any."""
    album = result.measured.get("album")
    if not isinstance(album, dict) or "samples" not in album:
        return None
    drawn, axes = panels(1, 1, width=7.0, height=1.9)
    strip(axes[0, 0], grey(album, "samples")[:16], "")
    return Figure(png_bytes=render_figure(drawn), caption=f"Drawn by this run: {result.job}")


def run_report(folders: Sequence[Path], out: Path | None, allow_code: bool) -> int:
    """Write the page and print where it is; what was left out goes to stderr."""
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
