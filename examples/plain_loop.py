import torch

import memtrain

cell = memtrain.make_cell("gru", vocab_size=8, memory_tokens=1, memory_dim=64)  # or your module
sizes: dict = dict(width=64, heads=4, head_dim=16, encoder_layers=2, decoder_layers=1)
teacher = memtrain.Teacher(vocab_size=8, memory_tokens=1, encoder="causal", **sizes)
rnn = memtrain.RNN(cell, teacher)  # its readout has the shape of the teacher's decoder
smt = memtrain.SMT(teacher, rnn, timesteps=0, future_length=10)  # all timesteps
for objective, steps in (smt, 200), (memtrain.DMT(teacher, rnn), 100):
    optimizer = torch.optim.AdamW(objective.trained_parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(8, (32, 10))
        targets = torch.full_like(tokens, memtrain.IGNORE_INDEX)
        targets[:, -1] = tokens[:, 0]  # at the end, the first token is asked
        optimizer.zero_grad()
        objective(tokens, targets=targets).total.backward()
        optimizer.step()
    objective.sync_readout()  # after SMT: copies the decoder into the readout
    print(objective, (rnn(tokens)[:, -1].argmax(-1) == tokens[:, 0]).float().mean())
