"""Compare SMT's loss curves with the fast path and with plain PyTorch, from the same seed.

    python scripts/loss_curves.py mnist --data data/mnist --out curves.json --figure curves.png
    python scripts/loss_curves.py digits --steps 20 --device cpu

Four trainings of a few hundred steps: the reference (`engine.fast` off); the fast path, from the
same weights and on the same windows; the reference with another seed, for the effect of the seed;
and on a GPU the reference in fp32, for the effect of rounding. A curve's distance is the root of
its mean squared difference from the reference's, over the second half of the steps. The fast path
is within noise if its distance is below a tenth of that of the other seed.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from memtrain.accel.engine import pick_device
from memtrain.config import RunConfig, Stream
from memtrain.recipes import recipe
from memtrain.training.run import Run
from memtrain.training.step import Trainer

WITHIN = 0.1
"""Fraction of another seed's distance."""


def curve(config: RunConfig) -> tuple[list[float], float]:
    """Train; return the decoding losses of all steps and the seconds."""
    run = Run(config, Path("unwritten"))
    trainer = Trainer(run.objective("smt"), config.smt, run.task, run.engine, config.seed)
    began = time.perf_counter()
    with trainer.frozen_rest():
        losses = [float(trainer.train_step()["decode"]) for _ in range(config.smt.steps)]
    return losses, time.perf_counter() - began


def variants(config: RunConfig, device: torch.device) -> dict[str, RunConfig]:
    """The configs of the trainings; fp32 only on a GPU."""
    plain = replace(config, engine=replace(config.engine, fast=False, compile=False))
    found = {
        "reference": plain,
        "fast": config,
        "another seed": replace(plain, seed=config.seed + 1),
    }
    if device.type == "cuda":
        found["fp32"] = replace(plain, engine=replace(plain.engine, precision="fp32"))
    return found


def distance(one: list[float], other: list[float]) -> float:
    half = len(one) // 2
    return float(np.sqrt(np.mean((np.array(one[half:]) - np.array(other[half:])) ** 2)))


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Plot the curves and their distances from the reference."""
    from memtrain.plotting.style import COLOURS, panels, save

    figure, axes = panels(1, 2, width=4.2, height=3.0)
    reference = np.array(curves["reference"])
    for colour, (name, losses) in zip(COLOURS, curves.items(), strict=False):
        style = dict(color=colour, linewidth=1, label=name)
        axes[0, 0].plot(losses, **style)
        if name != "reference":
            axes[0, 1].semilogy(np.abs(np.array(losses) - reference).clip(1e-8), **style)
    for axis, title in zip(
        axes[0], ("decoding loss, nats", "distance from the reference"), strict=True
    ):
        axis.set(xlabel="step", title=title)
        axis.legend()
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="mnist, tinystories, digits, ...")
    parser.add_argument("--data", help="folder of the prepared data set, if the recipe needs one")
    parser.add_argument("--size", help="size of the recipe: paper, medium, small, tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="write all losses and distances to this JSON file")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    config = recipe(options.recipe, options.size)
    if options.data:
        if not isinstance(config.data, Stream):
            parser.error(f"--data {options.data}: {options.recipe} makes its own data")
        config = replace(config, data=replace(config.data, path=options.data))
    config = replace(
        config,
        smt=replace(config.smt, steps=options.steps),
        engine=replace(config.engine, device=options.device),
    )
    device = pick_device(options.device)
    curves, seconds = {}, {}
    for name, variant in variants(config, device).items():
        curves[name], seconds[name] = curve(variant)
    apart = {name: distance(losses, curves["reference"]) for name, losses in curves.items()}
    good = apart["fast"] < WITHIN * apart["another seed"]
    for name, losses in curves.items():
        last = np.mean(losses[-max(1, len(losses) // 10) :])
        print(
            f"{name:<13} last tenth {last:.4f} nats, {apart[name]:.2e} apart, {seconds[name]:.1f} s"
        )
    print(f"the fast path is within noise: {'yes' if good else 'NO'}")
    if options.out:
        record = {
            "recipe": options.recipe,
            "steps": options.steps,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "distance_from_the_reference": apart,
            "seconds": seconds,
            "within_noise": good,
            "decode": curves,
        }
        options.out.write_text(json.dumps(record) + "\n")
    if options.figure:
        draw(curves, options.figure)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
