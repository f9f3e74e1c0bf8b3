"""The files of examples/ run and reach what they state."""

from pathlib import Path
from runpy import run_path

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_plain_loop_solves_its_task_without_the_teacher():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rnn = run_path(str(EXAMPLES / "plain_loop.py"))["rnn"]
        tokens = torch.randint(8, (1000, 10))
    with torch.no_grad():
        right = rnn(tokens)[:, -1].argmax(-1) == tokens[:, 0]
    assert float(right.float().mean()) > 0.98
