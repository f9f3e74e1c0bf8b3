"""One HTML page of everything reproduced: figures, verdicts, seeds and spread, single runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memtrain.chart import Chart, Series
from memtrain.config_json import to_json
from memtrain.experiments.experiment import Result, Tag
from memtrain.experiments.reproduce import Outcome, open_folder, outcomes
from memtrain.page import Code, Columns, Figure, Fold, Heading, Part, Table, Text, render_page
from memtrain.version import VERSION

SEED_TAGS = ("seed",)


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one or more folders that `memtrain reproduce` filled."""
    parts: list[Part] = []
    summary: list[list[Any]] = []
    for folder in folders:
        setup, _ = open_folder(folder)
        for found in outcomes(folder):
            title = f"{found.figure.title} ({found.figure.name}, {setup.scale})"
            summary.append([title, found.verdict.word, _runs(found), _seconds(found)])
            parts += _figure(found, title)
    scales = ", ".join(dict.fromkeys(open_folder(folder)[0].scale for folder in folders))
    held = sum(row[1] == "holds" for row in summary)
    page = render_page(
        "The paper's figures, reproduced",
        f"{len(summary)} tables and figures at the scale {scales}: each with the paper's claim, "
        f"whether it holds here, and the runs behind it. {held} hold.",
        [
            Table(header=["figure", "the claim", "runs", "training seconds"], rows=summary),
            *parts,
        ],
        f"memtrain {VERSION}. Results: {', '.join(str(folder) for folder in folders)}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


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
    if not album or "samples" not in album:
        return None
    import io

    from memtrain.drawing import panels, save
    from memtrain.experiments.drawing import strip
    from memtrain.experiments.pictures import grey

    drawn, axes = panels(1, 1, width=7.0, height=1.9)
    strip(axes[0, 0], grey(album, "samples")[:16], "")
    file = io.BytesIO()
    save(drawn, file)
    return Figure(png_bytes=file.getvalue(), caption=f"Drawn by this run: {result.job}")
