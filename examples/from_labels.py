"""Train an RNN from the states of an oracle: no teacher, no backpropagation through time.

The system is a counter modulo 5 that steps by 0, 1 or 2. Its true state after each input is known,
so it is the memory that the cell has to learn. Run: python examples/from_labels.py [FOLDER]
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import memtrain

MODULUS, LENGTH = 5, 24


def oracle(sequences: int) -> memtrain.Labels:
    """Inputs, and as memory (N, T, 1, 5) the state of the counter as a one-hot vector."""
    inputs = torch.randint(3, (sequences, LENGTH), generator=torch.Generator().manual_seed(0))
    state = inputs.cumsum(1) % MODULUS
    memories = F.one_hot(state, MODULUS).float()[:, :, None]
    return memtrain.Labels(inputs, memories, targets=state, normalize=True)


def main(folder: Path) -> float:
    """Write the labels, train from the file, and return the accuracy on held-out sequences."""
    labels = oracle(sequences=600).save(folder / "counter.safetensors")
    config = labels.config()
    config = replace(config, smt=replace(config.smt, steps=150), dmt=replace(config.dmt, steps=30))
    run = memtrain.Run.create(config, folder / "run").train()
    print(run.evaluate().rnn)  # rolled out from the empty memory
    memory = run.rnn.empty_memory(batch_size=1)
    for step in [1, 2, 2, 0, 1]:  # 1 + 2 + 2 + 0 + 1 = 6, the state is 1
        logits, memory = run.rnn.step(memory, torch.tensor([step], device=memory.device))
    print("state", int(logits[0].argmax()))
    return run.evaluate().rnn.accuracy


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/from-labels"))
