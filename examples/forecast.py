"""Forecast a series of numbers, and compare with the last value and with one season before.

Without a file it makes one: half-hourly demand with a daily season, weekends and a temperature that
is known beforehand. The same on the command line:

    memtrain train series --data demand.csv --data.known temperature --data.season 48
    memtrain eval runs/series                        # scores, and a picture of forecasts

Run: python examples/forecast.py [FILE.csv SEASON]   # a few minutes on two CPU cores
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

import memtrain


def make_demand(path: Path, days: int = 60, season: int = 48) -> Path:
    """Write a series whose next day differs from the last by weather, weekends and noise."""
    generator = torch.Generator().manual_seed(0)
    drift, rows = 0.0, ["temperature,demand"]
    weather = torch.randn(days + 1, generator=generator).cumsum(0) * 0.7
    for step in range(days * season):
        day, hour = divmod(step, season)
        mixed = torch.lerp(weather[day], weather[day + 1], hour / season)
        temperature = 10 + float(mixed) - 4 * math.cos(2 * math.pi * hour / season)
        drift = 0.95 * drift + 0.5 * float(torch.randn((), generator=generator))
        shape = math.sin(2 * math.pi * (hour - 14) / season)
        demand = 50 + 12 * shape - (8 if day % 7 > 4 else 0) - 1.5 * temperature + drift
        rows.append(f"{temperature:.3f},{demand:.3f}")
    path.write_text("\n".join(rows) + "\n")
    return path


def main(
    folder: Path, file: Path | None = None, season: int = 48, smt_steps: int = 1000
) -> memtrain.Run:
    """Train on the first four fifths of the series, forecast half a season of the last fifth."""
    folder.mkdir(parents=True, exist_ok=True)
    known = "" if file else "temperature"
    file = file or make_demand(folder / "demand.csv")
    config = memtrain.recipe("series")
    config = replace(
        config,
        data=replace(config.data, path=str(file), known=known, season=season),
        smt=replace(config.smt, steps=smt_steps),
        dmt=replace(config.dmt, steps=3 * smt_steps // 10),
    )
    run = memtrain.Run.create(config, folder / "run", overwrite=True).train()
    found = run.evaluate_forecasts(season // 2)
    for method, score in found.methods.items():
        print(f"{method}: CRPS {score.crps:.4f}, MAE {score.mae:.4f}, MSE {score.mse:.4f}")
    print(f"{found.coverage:.0%} of what followed is in the 80 % band")
    return run


if __name__ == "__main__":
    given = [Path(sys.argv[1]), int(sys.argv[2])] if len(sys.argv) > 2 else []
    main(Path("runs/forecast"), *given)  # pyright: ignore[reportArgumentType]
