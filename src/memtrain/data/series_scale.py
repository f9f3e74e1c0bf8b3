"""The scale of a series' numbers, from its training part, and the inputs of a model."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from memtrain.config import Series
from memtrain.data.series_format import SeriesFormat
from memtrain.errors import MemtrainError

GAP = "log time gap"
"""The name of the feature that `time_gap` adds."""


def log_gaps(
    times: Float64[np.ndarray, " R"], starts: Int64[np.ndarray, " S"]
) -> Float64[np.ndarray, " R"]:
    """The log of the time since the row before; missing in the first row of a series."""
    gaps = np.diff(times, prepend=np.nan)
    gaps[starts] = np.nan
    return np.log(gaps)


def fit_format(
    config: Series,
    targets: tuple[str, ...],
    known: tuple[str, ...],
    training: Float64[np.ndarray, "R X"],
) -> SeriesFormat:
    """The format, with mean and standard deviation of the training part."""
    centres, scales = [], []
    for name, column in zip((*targets, *known), training.T, strict=True):
        present = column[~np.isnan(column)]
        if not len(present):
            raise MemtrainError(
                f"{config.path}: column {name!r} has no number in the training part; leave it out"
                + _others(name, targets)
            )
        constant = present.min() == present.max()
        if constant and name in targets:
            raise MemtrainError(
                f"{config.path}: column {name!r} is {present[0]:g} in the whole training part, so "
                f"there is nothing to predict; leave it out{_others(name, targets)}"
            )
        is_gap = name == GAP and config.time_gap
        centres.append(float(np.log(np.median(np.exp(present))) if is_gap else present.mean()))
        scales.append(1.0 if constant or is_gap else float(present.std()))
    count = len(targets)
    return SeriesFormat(
        targets=targets,
        target_centre=tuple(centres[:count]),
        target_scale=tuple(scales[:count]),
        known=known,
        known_centre=tuple(centres[count:]),
        known_scale=tuple(scales[count:]),
        season=config.season,
    )


def check_held_out(
    config: Series, targets: tuple[str, ...], held_out: Float64[np.ndarray, "R Y"]
) -> None:
    """Refuse a column without a held-out number: its loss would be 0 of none."""
    for name, column in zip(targets, held_out.T, strict=True):
        if np.isnan(column).all():
            others = _others(name, targets)
            raise MemtrainError(
                f"{config.path}: column {name!r} has no number in the held-out part, the last "
                f"{config.held_out:g} of the rows; leave out the rows after its last number"
                + (f", or the column{others}" if others else "")
            )


def _others(name: str, targets: tuple[str, ...]) -> str:
    """The option that leaves a column out, if others are left."""
    rest = [one for one in targets if one != name]
    return f": --data.targets {','.join(rest)}" if rest and name in targets else ""


def model_inputs(
    numbers: Float64[np.ndarray, "R X"], series: SeriesFormat, ends: Int64[np.ndarray, " S"]
) -> Float32[np.ndarray, "R X"]:
    """The inputs of a model: target numbers of a row, then what is known of the next row."""
    centre = np.array(series.target_centre + series.known_centre)
    scale = np.array(series.target_scale + series.known_scale)
    with np.errstate(over="ignore"):  # is refused later
        inputs = ((numbers - centre) / scale).astype(np.float32)
    count = len(series.targets)
    inputs[:-1, count:] = inputs[1:, count:]
    inputs[ends - 1, count:] = np.nan  # nothing is known after the end
    return inputs
