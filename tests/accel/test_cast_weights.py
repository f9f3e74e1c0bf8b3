"""Copies of the weights in half precision give what autocast gives."""

import torch
from torch.testing import assert_close

from memtrain.accel.cuda_graphs import CastWeights
from memtrain.config import CellConfig, Retrieval, RunConfig, SMTConfig, TeacherConfig
from memtrain.data.task import build_task
from memtrain.models.build import build_models
from memtrain.objectives.smt import SMT


def test_losses_and_gradients_are_autocasts():
    config = RunConfig(
        data=Retrieval(sequence_length=8),
        teacher=TeacherConfig(
            width=16, heads=2, head_dim=8, context_length=8, encoder_layers=2, decoder_layers=1
        ),
        cell=CellConfig(width=16, heads=2, head_dim=8, memory_tokens=2, memory_dim=16, layers=1),
        smt=SMTConfig(timesteps=0, future_length=4, steps=1),
    )
    task = build_task(config.data)
    rnn, teacher = build_models(config, task.vocab_size)
    assert teacher is not None
    smt = SMT(teacher, rnn, config.smt)
    batch = task.sample(4, torch.Generator().manual_seed(1))
    found = []
    for objective in (smt, CastWeights(smt)):
        smt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = objective(batch, torch.Generator().manual_seed(2))
        losses.total.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in smt.named_parameters()
            if parameter.grad is not None
        }
        found.append((losses.total.detach(), gradients))
    assert all(g.dtype == torch.float32 for g in found[1][1].values())
    assert_close(found[1], found[0], rtol=0, atol=0)
