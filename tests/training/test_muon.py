"""Muon against torch's own, and on which parameters it is used."""

import pytest
import torch
from torch import nn

from conftest import tiny_rnn, tiny_teacher
from memtrain.training.muon import Muon, orthogonalized
from memtrain.training.optimizer import hidden_matrices


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_takes_the_steps_of_torch(shape: tuple[int, int], adjust: str):
    torch.manual_seed(0)
    start = torch.randn(shape)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = dict(lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
    ours, theirs = Muon([one], **options), torch.optim.Muon([other], **options)  # type: ignore
    for _ in range(5):
        gradient = torch.randn(shape)
        for parameter, optimizer in ((one, ours), (other, theirs)):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(one, start)


def test_matrices_of_one_shape_are_updated_as_if_alone():
    torch.manual_seed(0)
    shapes = [(6, 4), (6, 4), (4, 6), (6, 4)]
    starts = [torch.randn(shape) for shape in shapes]
    together = [nn.Parameter(start.clone()) for start in starts]
    alone = [nn.Parameter(start.clone()) for start in starts]
    optimizers = [Muon(together, lr=0.02), *(Muon([one], lr=0.02) for one in alone)]
    for _ in range(4):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, start in zip(together, alone, starts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # products in bf16
        assert not torch.allclose(one, start)


def test_an_update_has_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(8, 5)).float())
    assert bool(((values > 0.5) & (values < 1.5)).all())


def test_a_bad_step_leaves_weights_and_momentum_alone():
    weight = nn.Parameter(torch.ones(3, 2))
    muon = Muon([weight], lr=0.1)
    weight.grad = torch.randn(3, 2)
    muon.step()
    before = weight.detach().clone(), muon.state[weight]["momentum_buffer"].clone()
    weight.grad, muon.found_inf = torch.full((3, 2), float("nan")), torch.tensor(1.0)
    muon.step()
    assert torch.equal(weight, before[0])
    assert torch.equal(muon.state[weight]["momentum_buffer"], before[1])
    weight.grad, muon.found_inf = torch.randn(3, 2), torch.tensor(0.0)
    muon.step()
    assert not torch.equal(weight, before[0])


def test_muon_gets_matrices_of_hidden_layers_only():
    for model in (tiny_teacher("causal"), tiny_teacher(), tiny_rnn()):
        hidden = hidden_matrices([model])
        names = [name for name, p in model.named_parameters() if id(p) in hidden]
        assert names and all(model.get_parameter(name).dim() == 2 for name in names)
        wrong = ("embedding", "head.weight", "registers", "start")
        assert not [name for name in names if any(word in name for word in wrong)]
        assert any("attention" in name or "mlp" in name for name in names), names
