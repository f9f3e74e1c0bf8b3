"""Five synthetic tasks, two sweeps each: SMT, SMT → DMT and BPTT on the same cell.

At the scale gpu teacher and cell have 6/2/4 layers of width 128 and 8 memory tokens. The causal
encoder gives the memories of all timesteps in one pass. The decoder is trained at all timesteps of
sequences of up to 64 tokens, each with all later targets (T_f = T), and at 64 random ones of longer
sequences. SMT is trained once per setting, rate and seed, and every kind of DMT continues that run.

A learning rate is chosen per setting and method on other held-out sequences than those reported.
Runs come in order of what they tell: first one seed at each side's default rate, short sequences
before long ones and the methods of the claim before the others; then other rates; then more seeds.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, flat_scores
from memtrain.paper.configs import bptt_twin
from memtrain.paper.plots import cost_ratio, mean, where
from memtrain.paper.settings import (
    Setting,
    Sweep,
    best_accuracy,
    chance,
    dmt_config,
    settings_of,
    size_class,
    smt_config,
    steps_of,
    sweeps_of,
)
from memtrain.plotting.style import COLOURS, GREY, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memtrain.training.run import Run

VALIDATION_SEED = 2**31 - 2
"""Selects the held-out sequences on which rates are chosen. Reported are the usual ones."""
TRAINED = 0.95
"""A setting counts if its teacher has this share of the best possible accuracy."""
TIE = 0.01
"""Accuracies closer than this count as equal."""
ABOVE_CHANCE = 0.03
"""A method that is not this much above chance has learnt nothing."""
SHARE = 0.9
"""The share of the settings in which SMT → DMT must be at or above BPTT."""


# ------------------------------------------------------------------------------------- methods


class Method(NamedTuple):
    """A way to train the cell, and how it is drawn."""

    style: dict[str, Any]
    noise: float = 0.0
    """On the memories that SMT steps from."""
    dmt: dict[str, Any] | None = None
    """Fields of DMT, which continues the run of SMT with the same noise; None: no DMT."""
    claimed: bool = False
    """Run first, at every rate, and with every seed."""


ONE_STEP: dict[str, Any] = {}
"""The paper's DMT: gradients of one step, memory labels only."""
METHODS = {
    "SMT": Method(dict(color=COLOURS[5], marker="s"), claimed=True),
    "SMT → DMT": Method(dict(color=COLOURS[0], marker="o", lw=2), dmt=ONE_STEP, claimed=True),
    "SMT → DMT through time": Method(
        dict(color=COLOURS[0], marker="D", ls=":"), dmt={"through_time": True}
    ),
    "SMT → DMT with decoder": Method(
        dict(color=COLOURS[2], marker="o", lw=2),
        dmt={"through_time": True, "dynamics_weight": 1.0, "decode_weight": 1.0},
        claimed=True,
    ),
    "SMT with noise": Method(dict(color=COLOURS[4], marker="s", ls=":"), noise=0.1),
    "SMT with noise → DMT": Method(
        dict(color=COLOURS[4], marker="o"), noise=0.1, dmt=ONE_STEP
    ),
    "BPTT": Method(dict(color=COLOURS[1], marker="^", lw=2), claimed=True),
    "BPTT, equal seconds": Method(dict(color=COLOURS[3], marker="v", ls="--")),
}  # fmt: skip
"""By name. The fourth is ours: its gradients pass through the rollout, and the teacher's decoder
reads the cell's memories. `BPTT` has as many steps as SMT and DMT together, `BPTT, equal seconds`
as many seconds as SMT → DMT took in that setting."""
JUDGED = ("SMT → DMT", "SMT → DMT through time", "SMT → DMT with decoder")
"""Those that the claim may hold for: the paper's two kinds of DMT, and ours."""
FIRST_RATE = {"SMT": 1e-3, "BPTT": 3e-4}
"""What earlier runs of these tasks found best for each side (docs/LOG.md)."""


def rates(setup: Setup) -> tuple[float, ...]:
    """The same for both sides."""
    tried = (1e-4, 3e-4, 1e-3)
    return setup.pick(smoke=(1e-3,), cpu=(1e-3, 3e-3), gpu=tried, paper=tried)


def first_rate(setup: Setup, method: str) -> float:
    wanted = FIRST_RATE["BPTT" if method.startswith("BPTT") else "SMT"]
    return wanted if wanted in rates(setup) else rates(setup)[0]


# ---------------------------------------------------------------------------------------- runs


@cache  # an incremental figure makes its jobs after every run
def make_job(
    setup: Setup, setting: Setting, method: str, rate: float, seed: int, *, seconds: float = 0.0
) -> Job:
    """The job of a method in a setting; `seconds` is the time limit of BPTT at equal seconds."""
    about, start = METHODS[method], None
    config = smt_config(setup, setting, rate, seed, about.noise)
    if about.dmt is not None:
        start, config = config, replace(config, dmt=dmt_config(setup, setting, rate, about.dmt))
    elif method.startswith("BPTT"):
        steps = sum(steps_of(setup, setting.length))
        config = bptt_twin(setup, config, rate, steps=steps)
        bptt = replace(config.bptt, schedule=config.smt.schedule)
        if seconds:
            bptt = replace(bptt, steps=8 * steps, seconds=seconds)
            log = replace(config.log, evaluate_every=0, checkpoint_every=4 * steps)
            config = replace(config, log=log)
        config = replace(config, bptt=bptt)
    tags = {"task": setting.task, "setting": setting.name}
    tags |= {"method": method, "rate": rate, "seed": seed}
    rank = rank_of(setup, setting, method, rate, seed)
    return Job(config=config, tags=tags, start=start, rank=rank)


def rank_of(setup: Setup, setting: Setting, method: str, rate: float, seed: int) -> int:
    """The order of runs: part of the grid, length of the sequences, setting after setting."""
    part = 0 if METHODS[method].claimed else 1
    if rate != first_rate(setup, method):
        part = 2
    if seed:
        part = 3
    return 1000 * (4 * part + size_class(setting.length)) + settings_of(setup).index(setting)


class Synthetic(Experiment):
    name = "synthetic"
    claim = "SMT → DMT is at or above BPTT in every setting of five synthetic tasks."
    version = 2
    incremental = True

    def grid(self, setup: Setup) -> list[Job]:
        """Seed 0: every method at its default rate, those of the claim at the other rates too."""
        jobs = []
        for setting in settings_of(setup):
            for method in self._methods(setup, setting):
                claimed, first = METHODS[method].claimed, first_rate(setup, method)
                for rate in rates(setup) if claimed else (first,):
                    jobs.append(make_job(setup, setting, method, rate, 0))
        return jobs

    def _methods(self, setup: Setup, setting: Setting) -> list[str]:
        """The methods of the grid in a setting; the small scales and second curves have fewer."""
        names = [name for name in METHODS if name != "BPTT, equal seconds"]
        few = setup.scale == "smoke" and setting.full_name != "retrieval, T=8"
        if few or setting.needle_anywhere:
            return ["SMT", "SMT → DMT", "BPTT"]
        if setup.scale == "cpu":
            return [name for name in names if METHODS[name].claimed]
        return names

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        """BPTT for as many seconds as SMT → DMT took; more seeds, once the rates are compared."""
        jobs, first = [], first_rate(setup, "SMT → DMT")
        for setting in settings_of(setup):
            methods = self._methods(setup, setting)
            here = where(results, task=setting.task, setting=setting.name)
            timed = where(here, method="SMT → DMT", rate=first)
            if timed and "SMT → DMT through time" in methods:  # where all methods are run
                limit = {"seconds": max(0.1, round(timed[0].cost["seconds"], 1))}
                for rate in rates(setup):
                    jobs.append(make_job(setup, setting, "BPTT, equal seconds", rate, 0, **limit))
            for method in methods:
                found = where(here, method=method)
                if METHODS[method].claimed and len(found) == len(rates(setup)):
                    rate = chosen(found)[0]["rate"]
                    for seed in setup.seeds[1:]:
                        jobs.append(make_job(setup, setting, method, rate, seed))
        return jobs

    def measure(self, run: "Run") -> dict[str, Any]:
        """Scores on the reported sequences, and on those that rates are chosen on."""
        count = 4 * run.config.log.evaluate_sequences
        reported = flat_scores(asdict(run.evaluate(count)))
        validation = flat_scores(asdict(run.evaluate(count, seed=VALIDATION_SEED)))
        return reported | {f"validation_{name}": value for name, value in validation.items()}

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        found = [Row.of(setup, setting, results) for setting in settings_of(setup)]
        rows = [row for row in found if row is not None]
        main = [row for row in rows if not row.setting.needle_anywhere]
        second = [row for row in rows if row.setting.needle_anywhere]
        trained = [row for row in main if row.trained]
        untrained = {
            row.setting.full_name: round(row.teacher, 4) for row in main if not row.trained
        }
        needed = setup.pick(smoke=1, cpu=5, gpu=20, paper=20)
        names = [name for name in METHODS if "→" in name]
        steps = {name: Count.of(trained, name) for name in names}
        seconds = {name: Count.of(trained, name, "BPTT, equal seconds") for name in names}
        anywhere = Count.of(second, "SMT → DMT")
        judged = [steps[name] for name in JUDGED if steps[name].settings >= needed]
        holds = any(count.share >= SHARE for count in judged) if judged else None
        ours, theirs = (
            [run for row in trained for run in row.runs.get(name, [])]
            for name in ("SMT → DMT", "BPTT")
        )
        ratios = {
            f"bptt_{what}_over_ours": cost_ratio(ours, theirs, what)
            for what in ("steps", "tokens", "sequential_ops", "seconds")
        }
        parts = [f"The teacher is trained in {len(trained)} of {len(main)} settings."]
        if untrained:
            parts.append(f"Not trained: {listed(untrained)}.")
        for counts, what in ((steps, "with as many steps"), (seconds, "in as many seconds")):
            parts += [
                f"{name} against BPTT {what}: {count.describe(counts is steps)}."
                for name, count in counts.items()
                if count.settings or count.at_chance
            ]
        if second:
            parts.append(f"Needle anywhere, not counted: SMT → DMT {anywhere.describe()}.")
        if ours and theirs:
            parts.append(
                f"BPTT took {ratios['bptt_steps_over_ours']:.2f} times the steps of SMT → DMT, "
                f"{ratios['bptt_sequential_ops_over_ours']:.2f} the sequential operations and "
                f"{ratios['bptt_seconds_over_ours']:.2f} the seconds."
            )
        return Verdict(
            holds=holds,
            unjudged=f"not judged: {needed} settings with a trained teacher are needed",
            sentence=" ".join(parts),
            numbers={
                "settings": len(main),
                "teacher_trained": len(trained),
                "teacher_not_trained": untrained,
                "equal_steps": {name: count._asdict() for name, count in steps.items()},
                "equal_seconds": {name: count._asdict() for name, count in seconds.items()},
                "needle_anywhere": anywhere._asdict(),
                "all_rates": sum(row.all_rates for row in trained),
                "accuracy": {row.setting.full_name: row.numbers for row in rows},
                **ratios,
            },
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        sweeps = sweeps_of(setup)
        figure, axes = panels(2, len(sweeps), width=2.1, height=2.4, sharey=True)
        for column, (task, both) in enumerate(sweeps.items()):
            for row, sweep in enumerate(both):
                draw_sweep(axes[row, column], setup, sweep, results)
            axes[0, column].set_title(task)
        for row in range(2):
            axes[row, 0].set_ylabel("accuracy")
        handles = {
            label: handle
            for place in axes.ravel()
            for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
        }
        (empty,) = axes[0, 0].plot([], [], ls="", color=GREY, marker="o", mfc="white")
        handles |= {"hollow: teacher not trained": empty}
        place = {"loc": "outside lower center", "ncols": 4, "fontsize": 8.5, "frameon": False}
        figure.legend(handles.values(), handles, **place)
        return figure


# ------------------------------------------------------------------------------------- verdict


def chosen(runs: Sequence[Result], model: str = "rnn") -> list[Result]:
    """The runs at the rate whose first seed is the most accurate on the validation sequences."""
    first = where(runs, seed=0) or runs
    best = max(first, key=lambda run: run.measured.get(f"validation_{model}_accuracy", 0.0))
    return where(runs, rate=best["rate"])


def listed(values: dict[str, float]) -> str:
    return "; ".join(f"{name} {value:.2f}" for name, value in values.items()) or "none"


class Row(NamedTuple):
    """One setting: the teacher's accuracy, and the chosen runs of every method."""

    setting: Setting
    teacher: float
    runs: dict[str, list[Result]]
    all_rates: bool
    """Whether rates were chosen; until both sides have been run at all, each has its default."""

    @classmethod
    def of(cls, setup: Setup, setting: Setting, results: Sequence[Result]) -> "Row | None":
        """None if the teacher has not been trained yet."""
        here = where(results, task=setting.task, setting=setting.name)
        runs = {name: where(here, method=name) for name in METHODS}
        tried = ({run["rate"] for run in runs[name]} for name in ("SMT → DMT", "BPTT"))
        all_rates = all(len(each) == len(rates(setup)) for each in tried)
        if not all_rates:
            runs = {
                name: where(found, rate=first_rate(setup, name)) for name, found in runs.items()
            }
        runs = {name: found for name, found in runs.items() if found}
        if "SMT" not in runs:
            return None
        teacher = mean(chosen(runs["SMT"], "teacher"), "teacher_accuracy")
        return cls(
            setting, teacher, {name: chosen(found) for name, found in runs.items()}, all_rates
        )

    @property
    def trained(self) -> bool:
        return self.teacher >= TRAINED * best_accuracy(self.setting.data)

    def accuracy(self, method: str) -> float | None:
        runs = self.runs.get(method)
        return mean(runs, "rnn_accuracy") if runs else None

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything as JSON values."""
        found = {name: round(mean(runs, "rnn_accuracy"), 4) for name, runs in self.runs.items()}
        seeds = {name: len(runs) for name, runs in self.runs.items()}
        data = self.setting.data
        base = {
            "teacher": round(self.teacher, 4),
            "chance": round(chance(data), 4),
            "best_possible": round(best_accuracy(data), 4),
        }
        return base | found | {"seeds": seeds, "all_rates": self.all_rates}


class Count(NamedTuple):
    """In how many settings a method is above, at and below BPTT."""

    settings: int
    """Those counted: both methods have been run, and at least one is above chance."""
    won: int
    within: int
    lost: dict[str, float]
    """The differences in accuracy."""
    at_chance: list[str]
    """Settings in which neither method has learnt anything; not counted."""

    @classmethod
    def of(cls, rows: Sequence[Row], method: str, against: str = "BPTT") -> "Count":
        gaps, at_chance = {}, []
        for row in rows:
            ours, theirs = row.accuracy(method), row.accuracy(against)
            if ours is None or theirs is None:
                continue
            if max(ours, theirs) < chance(row.setting.data) + ABOVE_CHANCE:
                at_chance.append(row.setting.full_name)
            else:
                gaps[row.setting.full_name] = round(ours - theirs, 4)
        lost = {name: gap for name, gap in gaps.items() if gap < -TIE}
        won = sum(gap > TIE for gap in gaps.values())
        return cls(len(gaps), won, len(gaps) - won - len(lost), lost, at_chance)

    @property
    def share(self) -> float:
        return (self.won + self.within) / self.settings if self.settings else 0.0

    def describe(self, losses: bool = True) -> str:
        """In words; with `losses`, all settings that were lost."""
        lost = f" ({listed(self.lost)})" if self.lost and losses else ""
        both = f", both at chance in {len(self.at_chance)}" if self.at_chance else ""
        return (
            f"above in {self.won} of {self.settings}, within {TIE} in {self.within}, below in "
            f"{len(self.lost)}{lost}{both}"
        )


# ---------------------------------------------------------------------------------------- plot


def draw_sweep(axes: "Axes", setup: Setup, sweep: Sweep, results: Sequence[Result]) -> None:
    """One panel: all methods, chance, and hollow markers where the teacher is not trained."""
    values = list(sweep.settings)

    def rows(settings: dict[Any, Setting]) -> dict[int, Row]:
        """By the position on the x axis."""
        found = {
            values.index(value): Row.of(setup, setting, results)
            for value, setting in settings.items()
        }
        return {position: row for position, row in found.items() if row is not None}

    levels = [chance(setting.data) for setting in sweep.settings.values()]
    axes.plot(range(len(values)), levels, color=GREY, lw=0.8, ls="-.", label="chance")
    main, second = rows(sweep.settings), rows(sweep.second)
    _line(axes, main, "teacher", dict(color=GREY, marker=".", ls="--"))
    for name, method in METHODS.items():
        _line(axes, main, name, method.style)
    for name in ("SMT → DMT", "BPTT"):
        style = {**METHODS[name].style, "lw": 1.0, "alpha": 0.4, "zorder": 1.5}
        _line(axes, second, name, style, ", needle anywhere")
    axes.set(xticks=range(len(values)), xticklabels=[f"{value:g}" for value in values])
    axes.set(xlabel=sweep.label, ylim=(-0.03, 1.05), xlim=(-0.3, len(values) - 0.7))


def _line(
    axes: "Axes", rows: dict[int, Row], name: str, style: dict[str, Any], also: str = ""
) -> None:
    """The accuracies of a method, or of the teacher, where they are known."""
    points = {
        x: row.teacher if name == "teacher" else row.accuracy(name) for x, row in rows.items()
    }
    points = {x: y for x, y in points.items() if y is not None}
    if not points:
        return
    style = {"markersize": 4, "lw": 1.2, **style}
    axes.plot(list(points), list(points.values()), label=name + also, **style)
    hollow = {x: y for x, y in points.items() if not rows[x].trained}
    style |= {"ls": "", "mfc": "white"}
    axes.plot(list(hollow), list(hollow.values()), **style)


FIGURE = Synthetic()
