"""The decoder with a projected vocabulary: logits and gradients equal the plain decoder's."""

from typing import Any

import pytest
import torch

from memtrain.accel.cpu_decoder import VocabProjectedDecoder
from memtrain.config import TeacherConfig
from memtrain.models.teacher import Teacher

OPTIONS: list[dict[str, Any]] = [{}, {"rotary_fraction": 0.5, "head_bias": True}]


def random_teacher(layers: int, memory_tokens: int, memory_dim: int, **options: Any) -> Teacher:
    config = TeacherConfig(
        encoder="causal",
        context_length=8,
        width=8,
        encoder_layers=1,
        decoder_layers=layers,
        heads=2,
        head_dim=4,
        **options,
    )
    teacher = Teacher(config, 5, memory_tokens, memory_dim).double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return teacher


@pytest.mark.parametrize("options", OPTIONS, ids=["", "half-rotated-bias"])
@pytest.mark.parametrize("targets", [None, 1, 3], ids=["all", "one", "three"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 6), (1, 3, 12, 4), (2, 2, 8, 4), (3, 2, 8, 3), (1, 2, 8, 0)],
    ids=lambda shape: "L{}-M{}-D{}-K{}".format(*shape),
)
def test_logits_and_gradients_equal_the_plain_decoder(shape, targets, options):
    layers, memory_tokens, memory_dim, length = shape
    teacher = random_teacher(layers, memory_tokens, memory_dim, **options)
    memory = torch.randn(7, memory_tokens, memory_dim, dtype=torch.float64, requires_grad=True)
    future = torch.randint(5, (7, length))
    positions = None if targets is None else torch.randint(length + 1, (7, targets))
    expected = teacher.decode(memory, future, positions)
    fast = VocabProjectedDecoder()
    assert fast.serves(teacher, memory)
    found = fast(teacher, memory, future, positions)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(expected)
    inputs = [memory, teacher.embedding.weight, *teacher.decoder.parameters()]
    gradients = torch.autograd.grad((found * direction).sum(), inputs)
    references = torch.autograd.grad(
        (expected * direction).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


def test_used_only_with_fewer_symbols_than_futures():
    teacher, fast = random_teacher(1, 1, 8), VocabProjectedDecoder()
    assert fast.serves(teacher, torch.zeros(6, 1, 8))
    assert not fast.serves(teacher, torch.zeros(5, 1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast.serves(teacher, torch.zeros(6, 1, 8))
