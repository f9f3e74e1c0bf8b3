"""A world model in closed loop: a pendulum that is seen, pushed, and then only imagined.

The network sees where the pendulum is, not how fast it moves, and which torque acts next. It reads
20 steps, then predicts 200 more from the torques and its own predictions alone. The error is
measured before DMT, when the cell has learned single steps only, and after it.

    python examples/world_model.py                    # about five minutes on two CPU cores
    python examples/world_model.py --steps 60 30      # a quick look
"""

import argparse
import math
from pathlib import Path

import torch

import memtrain

READ, IMAGINED = 20, 200


class Pendulum(memtrain.Task):
    """A damped pendulum with random torques: cosine and sine of its angle, and the torque."""

    values = memtrain.Values(features=3, targets=2)  # an input: cos, sin, and the next torque
    sequence_length = 64
    unit = "number"

    def sample(self, count: int, generator: torch.Generator) -> memtrain.Batch:
        return self.simulate(count, self.sequence_length, generator)

    @staticmethod
    def simulate(count: int, steps: int, generator: torch.Generator) -> memtrain.Batch:
        angle = math.pi * (2 * torch.rand(count, generator=generator) - 1)
        speed = 2 * torch.randn(count, generator=generator)
        torque, seen, torques = torch.zeros(count), [], []
        for _ in range(steps + 1):
            torque = 0.9 * torque + 0.8 * torch.randn(count, generator=generator)
            seen.append(torch.stack([angle.cos(), angle.sin()], dim=-1))
            torques.append(torque[:, None])
            for _ in range(2):  # half steps of 0.05 seconds
                speed = speed + 0.05 * (torque - 5 * angle.sin() - 0.5 * speed)
                angle = angle + 0.05 * speed
        positions, known = torch.stack(seen, dim=1), torch.stack(torques, dim=1)
        inputs = torch.cat([positions, known], dim=-1)
        return memtrain.Batch(inputs[:, :-1], positions[:, 1:])


def config(smt_steps: int, dmt_steps: int) -> memtrain.RunConfig:
    size: dict = dict(width=64, heads=4, head_dim=16)
    return memtrain.RunConfig(
        name="pendulum",
        teacher=memtrain.TeacherConfig(
            encoder="causal", context_length=32, encoder_layers=2, decoder_layers=1, **size
        ),
        cell=memtrain.CellConfig(memory_tokens=2, memory_dim=64, layers=1, **size),
        smt=memtrain.SMTConfig(
            steps=smt_steps,
            learning_rate=2e-3,
            schedule="cosine",
            timesteps=0,  # all
            decode_timesteps=16,
            future_length=16,
            dynamics_weight=1.0,
        ),
        dmt=memtrain.DMTConfig(
            steps=dmt_steps,
            learning_rate=1e-3,
            schedule="cosine",
            label_stride=4,
            segment=8,  # gradients through eight steps, and
            decode_weight=1.0,  # the decoder's loss on the cell's own memories: beyond the paper
            future_length=16,
        ),
        log=memtrain.LogConfig(evaluate_every=0),
    )


def imagined_error(rnn: memtrain.RNN) -> torch.Tensor:
    """The mean squared error at each imagined step, over 256 pendulums."""
    whole = Pendulum.simulate(256, READ + IMAGINED, torch.Generator().manual_seed(1))
    past, torques = whole.inputs[:, :READ], whole.inputs[:, READ:, 2:]
    imagined = memtrain.forecast(rnn, past, IMAGINED, known=torques, mean=True).mean()
    return (imagined - whole.targets[:, READ - 1 : -1]).square().mean(dim=(0, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, nargs=2, default=(1000, 500), help="of SMT and DMT")
    parser.add_argument("--folder", type=Path, default=Path("runs/pendulum"))
    options = parser.parse_args()
    run = memtrain.Run.create(config(*options.steps), options.folder, task=Pendulum())
    for stage in ("smt", "dmt"):
        error = imagined_error(run.train(until=stage).rnn)
        shown = ", ".join(f"{float(error[at - 1]):.4f} at {at}" for at in (1, 10, 50))
        last = float(error[-20:].mean())
        print(f"after {stage}: squared error {shown}, {last:.4f} at {IMAGINED - 20}..{IMAGINED}")


if __name__ == "__main__":
    main()
