"""Train torch's own LSTM cell by SMT -> DMT: no unrolling in the first stage, no new code.

`memtrain.wrap` makes a cell of any module (input, states) -> states; here h and c of an LSTM become
the two tokens of the memory. The same on the command line:

    memtrain train retrieval --cell.kind torch.nn:LSTMCell --teacher.no-normalize-memory

Run: python examples/published_cell.py [FOLDER]    # about a minute on two CPU cores
"""

import sys
from dataclasses import replace
from pathlib import Path

from torch import nn

import memtrain


def main(folder: Path, smt_steps: int = 600, dmt_steps: int = 300) -> float:
    """Train retrieval, and return the accuracy of the LSTM alone on new sequences."""
    config = memtrain.recipe("retrieval")
    config = replace(
        config,
        data=replace(config.data, sequence_length=16),
        teacher=replace(config.teacher, normalize_memory=False),  # an LSTM's h is below 1
        smt=replace(config.smt, steps=smt_steps),
        dmt=replace(config.dmt, steps=dmt_steps),
    )
    cell = memtrain.wrap(nn.LSTMCell(64, 64), vocab_size=config.data.vocab_size)
    run = memtrain.Run.create(config, folder, cell=cell, overwrite=True).train()
    print(run.evaluate().rnn)  # from the empty memory, without the teacher
    return run.evaluate().rnn.accuracy


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lstm"))
