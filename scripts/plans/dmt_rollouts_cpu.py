"""DMT without rollouts beside today's, in half of its CPU seconds, from the same SMT; sizes for a CPU.

TinyStories at size tiny, on `TINYSTORIES`, with a Transformer cell and a GRU, and the 8x8 digits.
"unrolled" is the recipe's DMT; "half" the same with half of its steps; the others carry memories
from step to step, or sweep from the teacher's memories, with as many steps as take half of the
recipe's CPU seconds (`MS`, one thread, measured by turns). Train the runs "smt" first: the others
start from their weights, in `FOLDER`.

    python scripts/many_runs.py scripts/plans/dmt_rollouts_cpu.py --folder runs/rollouts --only RUN ...
"""  # noqa: E501

import os
from dataclasses import replace
from pathlib import Path

from memtrain.config import DMTConfig, RunConfig, SMTConfig, Stream
from memtrain.recipes import recipe

FOLDER = Path(os.environ.get("FOLDER", "runs/rollouts"))
SEEDS = (0, 1, 2)
KINDS: dict[str, dict] = {
    "carried-8": {"rollout": "carried", "segment": 8},
    "carried-16": {"rollout": "carried", "segment": 16},
    "carried-32": {"rollout": "carried", "segment": 32},
    "picard-2": {"rollout": "picard", "sweeps": 2},
    "picard-4": {"rollout": "picard", "sweeps": 4},
}
MS: dict[str, dict[str, float]] = {
    "stories": {
        "unrolled": 48.6,
        "carried-8": 11.2,
        "carried-16": 13.5,
        "carried-32": 18.8,
        "picard-2": 58.8,
        "picard-4": 63.0,
    },
    "stories-gru": {
        "unrolled": 24.8,
        "carried-8": 9.0,
        "carried-16": 11.1,
        "carried-32": 14.0,
        "picard-2": 39.5,
        "picard-4": 40.6,
    },
    "digits": {
        "unrolled": 243.5,
        "carried-8": 42.8,
        "carried-16": 68.6,
        "carried-32": 116.1,
        "picard-2": 388.0,
        "picard-4": 480.7,
    },
}
"""Milliseconds of CPU per step, on a machine that other work shared."""


def recipe_of(data: str) -> RunConfig:
    if data == "digits":
        config = recipe("digits")
    else:
        cell = "gru" if data == "stories-gru" else "transformer"
        config = recipe("tinystories", "tiny", "smt-dmt", cell)
        path = os.environ.get("TINYSTORIES", "data/tinystories")
        config = replace(config, data=Stream(path=path, evaluate_length=256))
    log = replace(config.log, evaluate_every=0, evaluate_sequences=64, checkpoint_every=10**6)
    return replace(config, log=log)


RUNS: dict[str, RunConfig] = {}
for data, each in MS.items():
    for seed in SEEDS:
        config = replace(recipe_of(data), seed=seed)
        start = f"{data}-smt-seed{seed}"
        RUNS[start] = replace(config, dmt=DMTConfig())
        config = replace(config, smt=SMTConfig(), initial=str(FOLDER / start))
        today = config.dmt
        RUNS[f"{data}-unrolled-seed{seed}"] = config
        RUNS[f"{data}-half-seed{seed}"] = replace(
            config, dmt=replace(today, steps=today.steps // 2)
        )
        for kind, changes in KINDS.items():
            steps = round(today.steps * each["unrolled"] / 2 / each[kind])
            stage = replace(today, steps=steps, **changes)
            RUNS[f"{data}-{kind}-seed{seed}"] = replace(config, dmt=stage)
