"""Retrieval at T = 256, 1,024 and 4,096, the needle in the first half: SMT -> DMT, beside BPTT.

One run per method and length: every stage goes through the same curriculum over the length, from 8
tokens, since BPTT of the Transformer cell does not learn the task at 32 at once. BPTT takes as many
steps as SMT and DMT together, at most in the seconds of `SECONDS`, which shorten its curriculum in
proportion.

    python scripts/many_runs.py scripts/plans/retrieval_long.py --processes 4 --only RUN ...

Memory, estimated from the tensors that one sequence in bf16 saves for the backward pass, on a CPU
without our kernels, times the sequences of a step: SMT 5, 26 and 43 GiB at T = 256, 1,024 and
4,096; DMT 1, 2 and 2; BPTT of the Transformer cell 2, 8 and 8, of a GRU or LSTM about 1. With half
as much again for the rest, 140 GB hold twelve runs at once at T = 256, of SMT three at 1,024 and
two at 4,096, beside runs of BPTT.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from memtrain.config import DMTConfig, RunConfig

plan = runpy.run_path(str(Path(__file__).with_name("retrieval.py")))
CURRICULUM = {8: 500, 16: 500, 32: 1_000, 64: 1_000, 128: 1_500}
"""Steps at each length before the first of the plan."""
LONGER = {256: 2_000, 512: 1_500, 1_024: 1_500, 2_048: 1_000}
"""Steps at each of the lengths after it, where they are not the last."""
LAST = {256: 2_000, 1_024: 2_000, 4_096: 1_000}
DMT_LONGER = {256: 3_000, 512: 1_500, 1_024: 1_500, 2_048: 1_000}
DMT_LAST = {256: 6_000, 1_024: 4_000, 4_096: 2_000}
"""DMT begins at 256: at that length it kept what SMT had learned in 6,000 steps of 31 ms."""
SEQUENCES = {256: 64, 1_024: 64, 4_096: 16}
"""Per step: the memory of SMT's step grows with the square of the length."""
DECODED = {256: 16, 1_024: 8, 4_096: 4}
"""Timesteps of each sequence whose futures, of up to T tokens, are decoded in a step of SMT."""
SECONDS = {256: 600.0, 1_024: 1_800.0, 4_096: 3_600.0}
"""Most seconds of BPTT."""


def shorter(length: int, steps: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """The lengths before this one, with their steps."""
    return tuple(pair for pair in steps.items() if pair[0] < length)


def smt_dmt(length: int, seed: int) -> RunConfig:
    """Noise on SMT's memories, then the paper's DMT: one step, memory labels only."""
    config = plan["smt_dmt"](length, seed, memory_noise=0.1)
    before, rolled = shorter(length, CURRICULUM | LONGER), shorter(length, DMT_LONGER)
    return replace(
        config,
        smt=replace(
            config.smt,
            steps=sum(steps for _, steps in before) + LAST[length],
            curriculum=before,
            seconds=0.0,
            batch_size=SEQUENCES[length],
            decode_timesteps=DECODED[length],
        ),
        dmt=DMTConfig(
            steps=sum(steps for _, steps in rolled) + DMT_LAST[length],
            curriculum=rolled,
            batch_size=SEQUENCES[length],
            learning_rate=1e-4,
        ),
        log=replace(config.log, evaluate_every=2_000, evaluate_sequences=256, checkpoint_every=500),
    )


def bptt(length: int, rate: float, cell: str) -> RunConfig:
    """The same cell, or a GRU or LSTM of two layers of 256, through SMT's curriculum."""
    config, ours = plan["bptt"](length, 0, rate, "gru"), smt_dmt(length, 0)
    cells = {
        "transformer": ours.cell,
        "gru": config.cell,
        "lstm": replace(config.cell, kind="lstm", memory_tokens=4),  # two per layer
    }
    return replace(
        config,
        cell=cells[cell],
        bptt=replace(
            config.bptt,
            steps=ours.smt.steps + ours.dmt.steps,
            curriculum=ours.smt.curriculum,
            seconds=SECONDS[length],
            batch_size=SEQUENCES[length],
        ),
        log=ours.log,
    )


RUNS = {f"smt-dmt-T{T}-seed{seed}": smt_dmt(T, seed) for T in (256, 1_024) for seed in range(3)}
RUNS |= {"smt-dmt-T4096-seed0": smt_dmt(4_096, 0)}
RUNS |= {
    f"bptt-{cell}-T{T}-{rate:g}": bptt(T, rate, cell)
    for T in (256, 1_024, 4_096)
    for cell, rate in (("transformer", 3e-4), ("gru", 1e-3), ("lstm", 1e-3))
}
RUNS |= {"bptt-transformer-T256-0.001": bptt(256, 1e-3, "transformer")}
