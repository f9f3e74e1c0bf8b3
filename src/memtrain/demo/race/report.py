"""The result of a race: a table, a figure, and the sentence that says what to take."""

import math
from dataclasses import dataclass
from statistics import stdev
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from memtrain.demo.race.plan import CONTENDERS, FACTORS, RaceFile
from memtrain.plotting.comparison import loss_figure, short_count
from memtrain.runs.progress import MetricsFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = 1 / math.log(2)
CLEAR = 2.0
"""A difference counts if it is this many times its standard error."""
UNEQUAL = 1.25
"""Networks that had this many times as much of the processor as another are named."""


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    key: str
    title: str
    bits: float
    groups: list[float]
    """Bits of each group of held-out sequences; empty for counts."""
    measured: dict[str, Any]

    @property
    def milliseconds(self) -> float | None:
        return self.measured.get("milliseconds")

    def gap(self, other: "Entry") -> tuple[float, float]:
        """How many bits more than another, and the standard error of that (0: not known)."""
        pairs = zip(self.groups, other.groups, strict=False)
        apart = [own - theirs for own, theirs in pairs]
        error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        return self.bits - other.bits, error


def entries(race: RaceFile) -> list[Entry]:
    """All lines that have a loss, the best first."""
    found = []
    for key, result in race.results.items():
        if result.get("nats") is None:
            continue
        title = CONTENDERS[key].title if key in CONTENDERS else result["title"]
        groups = [BITS * one for one in result.get("groups", [])]
        found.append(Entry(key, title, BITS * result["nats"], groups, result))
    return sorted(found, key=lambda one: one.bits)


def race_table(race: RaceFile, unit: str) -> Table:
    """One line per method, in at most 80 columns."""
    names = ("bits", "±", "params", "rate", "steps", "tokens", "seqops", "sec", "ms")
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    first = Column("method", no_wrap=True, overflow="ellipsis")
    table = Table(
        first,
        *columns,
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=f"bits per {unit} on held-out data, and its standard error; seconds of the last "
        "training; milliseconds per generated token",
        caption_justify="left",
    )
    for one in entries(race):
        result = one.measured
        error = stdev(one.groups) / math.sqrt(len(one.groups)) if len(one.groups) > 1 else None
        ms = one.milliseconds
        table.add_row(
            one.title,
            f"{one.bits:.3f}",
            "" if error is None else f"{error:.3f}",
            short_count(result.get("parameters")),
            f"{result['rates'][0]:.0e}".replace("e-0", "e-") if "rates" in result else "-",
            *(
                short_count(result.get(f"total_{key}"))
                for key in ("steps", "tokens", "sequential_ops")
            ),
            short_count(result.get("total_seconds")),
            "-" if ms is None else f"{ms:.2f}",
        )
    return table


def race_figure(race: RaceFile, unit: str) -> "Figure":
    """Held-out losses while training, over steps, tokens, sequential operations and seconds."""
    curves, levels = {}, {}
    for one in entries(race):
        if one.key in CONTENDERS:
            lines = MetricsFile(race.folder / one.key / "metrics.jsonl").read()
            curves[one.title] = [line for line in lines if "evaluation" in line]
        else:
            levels[one.title] = one.bits
    curves = {name: lines for name, lines in curves.items() if lines}
    minutes = f"{race.plan.minutes:g} minutes for {len(race.plan.methods)} networks"
    return loss_figure(curves, f"bits per {unit}", minutes, levels, BITS)


def verdict_of_race(race: RaceFile, unit: str) -> str:
    """Which method to take for this data, why, and how large its lead is."""
    every = entries(race)
    networks, equal = ranked_networks(race)
    if not networks:
        return "No network was trained to its end; see the notes above."
    best, chosen = networks[0], equal[0]
    words = _network_words(chosen, networks, equal, unit)
    if every[0].key in CONTENDERS:
        return f"For this data take {words}"
    other = every[0]
    gap, _ = best.gap(other)
    return (
        f"For this data take {other.title}, which is no network: {other.bits:.3f} bits per {unit}, "
        f"{gap:.3f} ({gap / best.bits:.0%}) less than the best network after these minutes. "
        f"To generate, or with more minutes, take {words}"
    )


def ranked_networks(race: RaceFile) -> tuple[list[Entry], list[Entry]]:
    """All networks, the best first; and those that are not clearly worse, the fastest first."""
    networks = [one for one in entries(race) if one.key in CONTENDERS]
    equal = networks[:1]
    for one in networks[1:]:
        gap, error = one.gap(networks[0])
        equal += [one] if gap < CLEAR * error else []
    return networks, sorted(equal, key=lambda one: one.milliseconds or math.inf)


def _network_words(chosen: Entry, networks: list[Entry], equal: list[Entry], unit: str) -> str:
    words = f"{chosen.title}: {chosen.bits:.3f} bits per {unit} on held-out data"
    rest = [one for one in networks if one not in equal]
    if len(equal) > 1:
        names = ", ".join(f"{one.title} ({one.bits:.3f})" for one in equal[1:])
        words += f", equal within the noise to {names}, and it generates fastest of these"
    if rest:
        gap, error = rest[0].gap(chosen)
        words += (
            f"{'; it has' if len(equal) > 1 else ','} {gap:.3f} ± {error:.3f} "
            f"({gap / rest[0].bits:.0%}) less than the next network, {rest[0].title}"
        )
    words += f"; a generated token takes {chosen.milliseconds:.2f} ms"
    faster = [one for one in networks if (one.milliseconds or 0) < 0.8 * (chosen.milliseconds or 0)]
    if faster:
        quick = min(faster, key=lambda one: one.milliseconds or 0)
        words += f", {quick.milliseconds:.2f} with {quick.title}"
    return words + "."


def notes_of_race(race: RaceFile) -> list[str]:
    """What a reader of the table has to know."""
    plan, found = race.plan, []
    for key, result in race.results.items():
        if result.get("problem"):
            title = CONTENDERS[key].title if key in CONTENDERS else result["title"]
            found.append(f"{title}: {result['problem']}")
    rates = {key: result.get("factor") for key, result in race.results.items()}
    ends = [key for key, factor in rates.items() if factor in (FACTORS[0], FACTORS[-1])]
    if ends:
        found.append(
            f"the best rate was the smallest or the largest tried: {', '.join(ends)}; another may "
            "be better"
        )
    shares = {
        key: one["cpu"] / one["seconds"] for key, one in race.shares.items() if one["seconds"] > 0
    }
    if plan.device == "cpu" and len(shares) > 1:
        least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        if shares[most] > UNEQUAL * shares[least]:
            found.append(
                f"the processor was not equally free: {least} had {shares[least]:.2f} of a core, "
                f"{most} {shares[most]:.2f}; repeat the race on an idle machine"
            )
    return found


def race_json(race: RaceFile, unit: str) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "folder": str(race.folder),
        "minutes": race.plan.minutes,
        "unit": unit,
        "entries": [
            {"key": one.key, "title": one.title, "bits": one.bits, **one.measured}
            for one in entries(race)
        ],
        "trials": race.trials,
        "notes": notes_of_race(race),
        "verdict": verdict_of_race(race, unit),
    }
