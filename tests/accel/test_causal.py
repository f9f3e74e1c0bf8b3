"""What stands in for the causal encoder: the plain one's memories and gradients."""

import pytest
import torch

from memtrain.accel.causal_cpu import CausalEncoderCPU
from memtrain.accel.causal_gpu import LONGEST, CausalEncoderGPU
from memtrain.accel.cpu_transformer import rms_normalized
from memtrain.config import TeacherConfig
from memtrain.models.teacher import CausalEncoder, Teacher


def random_teacher(layers: int, memory_tokens: int, memory_dim: int, context: int) -> Teacher:
    config = TeacherConfig(
        encoder="causal",
        context_length=context,
        width=8,
        encoder_layers=layers,
        decoder_layers=1,
        heads=2,
        head_dim=6,
    )
    teacher = Teacher(config, 5, memory_tokens, memory_dim).double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return teacher


STANDINS = {
    "fewer operations": CausalEncoderCPU(),
    "one sequence": CausalEncoderGPU(compiled=False),
}


@pytest.mark.parametrize("fast", STANDINS.values(), ids=STANDINS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 9, 6), (2, 1, 8, 9, 6), (2, 3, 12, 2, 7), (3, 2, 8, 3, 9)],
    ids=lambda shape: "L{}-M{}-D{}-C{}-T{}".format(*shape),
)
def test_memories_and_gradients_are_those_of_the_plain_encoder(shape, fast):
    layers, memory_tokens, memory_dim, context, length = shape
    teacher = random_teacher(layers, memory_tokens, memory_dim, context)
    encoder = teacher.encoder
    assert isinstance(encoder, CausalEncoder)
    inputs = torch.randint(5, (4, length))
    steps = torch.randint(-1, length, (4, 3))
    expected = teacher.encode_with_logits(inputs, steps)
    encoder.fast = fast
    assert fast.serves(encoder, inputs, steps, teacher.embedding)
    found = teacher.encode_with_logits(inputs, steps)
    wanted = [teacher.embedding.weight, *encoder.parameters()]
    for ours, theirs in zip(found, expected, strict=True):  # memories, and what tokens tell
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        direction = torch.randn_like(theirs)
        gradients, references = (
            torch.autograd.grad(
                (one * direction).sum(),
                wanted,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for one in (ours, theirs)
        )
        for gradient, reference in zip(gradients, references, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


def test_it_serves_where_there_are_fewer_symbols_than_tokens():
    teacher, fast = random_teacher(1, 1, 8, 4), CausalEncoderCPU()
    encoder = teacher.encoder
    assert isinstance(encoder, CausalEncoder)
    for rows, length, served in ((2, 3, True), (1, 5, False)):
        inputs = torch.zeros(rows, length, dtype=torch.long)
        assert fast.serves(encoder, inputs, inputs[:, :1], teacher.embedding) is served


def test_one_sequence_is_not_for_the_registers_of_every_step():
    teacher, fast = random_teacher(1, 3, 8, 4), CausalEncoderGPU(compiled=False)
    encoder = teacher.encoder
    assert isinstance(encoder, CausalEncoder)
    for length, served in ((LONGEST // 4, True), (LONGEST // 4 + 1, False)):
        inputs = torch.zeros(1, length, dtype=torch.long)
        assert fast.serves(encoder, inputs, inputs, teacher.embedding) is served


def test_the_written_out_norm_has_the_right_gradient():
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.rms_norm(x, (5,), eps=1e-6)
    torch.testing.assert_close(rms_normalized(x), expected)
    assert torch.autograd.gradcheck(rms_normalized, x)
