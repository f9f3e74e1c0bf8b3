import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from conftest import (
    ENCODERS,
    VOCAB,
    other_token,
    random_tokens,
    receives_gradient,
    seeded,
    tiny_config,
    tiny_teacher,
)
from memtrain.config import TeacherConfig
from memtrain.models import teacher as teacher_module
from memtrain.models.layers import Block
from memtrain.models.teacher import CausalEncoder, Decoder, EncoderOutput, Teacher

ROWS, LENGTH = 2, 9
CONTEXTS = pytest.mark.parametrize("context_length", [1, 4, 9, 20], ids=lambda c: f"C{c}")
BOTH = pytest.mark.parametrize("encoder", ENCODERS)


def steps_of(*steps: int) -> Tensor:
    return torch.tensor(steps).expand(ROWS, -1)


class TestBothEncoders:
    @BOTH
    @CONTEXTS
    def test_memory_after_t_is_the_encoding_of_the_prefix_alone(self, encoder, context_length):
        teacher, inputs = tiny_teacher(encoder, context_length=context_length), random_tokens(2, 9)
        memories = teacher.encode(inputs)
        for t in range(LENGTH):
            alone = teacher.encode(inputs[:, : t + 1])[:, -1]
            assert_close(memories[:, t], alone, atol=1e-5, rtol=0)

    @BOTH
    @CONTEXTS
    def test_chosen_steps_equal_those_of_the_full_run(self, encoder, context_length):
        teacher, inputs = tiny_teacher(encoder, context_length=context_length), random_tokens(2, 9)
        steps = torch.tensor([[3, 0, 8, 3], [7, 7, 1, 5]])  # neither sorted nor distinct
        chosen = teacher.encode(inputs, steps)
        rows = torch.arange(ROWS)[:, None]
        assert_close(chosen, teacher.encode(inputs)[rows, steps], atol=1e-5, rtol=0)

    @BOTH
    def test_every_token_within_the_context_matters(self, encoder):
        teacher, inputs = tiny_teacher(encoder, context_length=LENGTH), random_tokens(2, 9)
        memory = teacher.encode(inputs)[:, -1]
        for position in range(LENGTH):
            changed = inputs.clone()
            changed[:, position] = other_token(inputs[:, position])
            moved = (teacher.encode(changed)[:, -1] - memory).abs().amax(dim=(1, 2))
            assert (moved > 1e-4).all(), position

    @BOTH
    def test_the_order_of_tokens_matters(self, encoder):
        teacher = tiny_teacher(encoder)
        one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
        change = teacher.encode(one)[:, -1] - teacher.encode(other)[:, -1]
        assert change.abs().max() > 1e-3

    @BOTH
    def test_memories_have_rms_1_when_normalised_and_not_otherwise(self, encoder):
        inputs = random_tokens(2, 9)
        rms = {
            normalised: tiny_teacher(encoder, normalize_memory=normalised, memory_dim=12)
            .encode(inputs)
            .square()
            .mean(-1)
            .sqrt()
            for normalised in (True, False)
        }
        assert_close(rms[True], torch.ones(ROWS, LENGTH, 2), atol=1e-4, rtol=0)
        assert ((rms[False] - 1).abs() > 0.01).any()

    @BOTH
    @pytest.mark.parametrize(("memory_tokens", "memory_dim"), [(1, 16), (3, 24), (2, 5)])
    def test_memory_has_its_own_tokens_and_width(self, encoder, memory_tokens, memory_dim):
        teacher = tiny_teacher(encoder, memory_tokens=memory_tokens, memory_dim=memory_dim)
        memory = teacher.encode(random_tokens(2, 5))
        assert memory.shape == (2, 5, memory_tokens, memory_dim)
        logits = teacher.decode(memory[:, 0], random_tokens(2, 3))
        assert logits.shape == (2, 4, VOCAB)

    @BOTH
    def test_gradient_reaches_every_part_of_the_encoder_and_the_embedding(self, encoder):
        teacher = tiny_teacher(encoder, memory_dim=12)
        probe = torch.randn(2, 5, 2, 12, generator=seeded())
        (teacher.encode(random_tokens(2, 5)) * probe).sum().backward()
        for name, parameter in teacher.encoder.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name
        registers = teacher.encoder.registers.grad
        assert isinstance(registers, Tensor)
        assert (registers.abs().amax(1) > 0).all()
        assert teacher.embedding.weight.grad is not None


class TestBidirectionalEncoder:
    @pytest.mark.parametrize("context_length", [1, 3, 6], ids=lambda c: f"C{c}")
    def test_tokens_older_than_the_context_do_not_matter(self, context_length):
        teacher, inputs = tiny_teacher(context_length=context_length), random_tokens(2, 9)
        t = 7
        oldest = t - context_length + 1
        memory = teacher.encode(inputs, steps_of(t))
        changed = inputs.clone()
        changed[:, :oldest] = other_token(inputs[:, :oldest])
        assert torch.equal(teacher.encode(changed, steps_of(t)), memory)
        changed[:, oldest] = other_token(inputs[:, oldest])
        assert ((teacher.encode(changed, steps_of(t)) - memory).abs() > 1e-3).any()

    def test_padding_before_the_sequence_equals_encoding_the_prefix_alone(self):
        teacher = tiny_teacher(padding="void", context_length=6)
        inputs = random_tokens(3, 9)
        memory = teacher.encode(inputs)
        for t in range(9):
            assert_close(teacher.encode(inputs[:, : t + 1])[:, t], memory[:, t])

    def test_the_padding_is_learned_and_visible_in_short_contexts_only(self):
        teacher = tiny_teacher(padding="void", context_length=4)
        inputs = random_tokens(2, 9)
        for step, seen in ((2, True), (3, False), (8, False)):
            teacher.zero_grad()
            teacher.encode(inputs, torch.full((2, 1), step)).square().mul(
                torch.arange(16.0)
            ).sum().backward()
            void = teacher.get_parameter("encoder.void")
            assert void.grad is not None and bool(void.grad.any()) is seen

    @pytest.mark.parametrize("padding", ["mask", "void"])
    def test_before_the_first_input_the_memory_is_empty(self, padding):
        teacher = tiny_teacher(padding=padding)
        memory = teacher.encode(random_tokens(3, 5), torch.tensor([[-1, 0]]).expand(3, 2))
        assert not memory[:, 0].any() and bool(memory[:, 1].any())


class TestCausalEncoder:
    @pytest.mark.parametrize("layers", [1, 2, 3], ids=lambda n: f"L{n}")
    def test_every_layer_attends_over_the_context_length(self, layers):
        context_length, t = 3, 8
        teacher = tiny_teacher("causal", context_length=context_length, encoder_layers=layers)
        inputs = random_tokens(2, 9)
        oldest = t - layers * (context_length - 1)
        memory = teacher.encode(inputs, steps_of(t))
        changed = inputs.clone()
        changed[:, :oldest] = other_token(inputs[:, :oldest])
        assert torch.equal(teacher.encode(changed, steps_of(t)), memory)
        changed[:, oldest] = other_token(inputs[:, oldest])
        assert ((teacher.encode(changed, steps_of(t)) - memory).abs() > 1e-5).any()

    @CONTEXTS
    def test_one_causal_layer_equals_the_bidirectional_encoder(self, context_length):
        # Registers see raw tokens and one another in both; only deeper layers differ.
        causal, bidirectional = (
            tiny_teacher(encoder, context_length=context_length, encoder_layers=1, memory_tokens=3)
            for encoder in ("causal", "bidirectional")
        )
        causal.load_state_dict(bidirectional.state_dict())
        inputs = random_tokens(2, 9)
        assert_close(causal.encode(inputs), bidirectional.encode(inputs), atol=1e-5, rtol=0)

    def test_tokens_depend_on_their_past_only_and_memories_are_unchanged(self):
        teacher, inputs = tiny_teacher("causal", context_length=4), random_tokens(2, 9)
        memory, logits = teacher.encode_with_logits(inputs, steps_of(*range(LENGTH)))
        assert_close(memory, teacher.encode(inputs))
        assert logits.shape == (2, 9, teacher.decoder.head.out_features)
        changed = inputs.clone()
        changed[:, 5] = other_token(inputs[:, 5])
        _, other = teacher.encode_with_logits(changed, steps_of(*range(LENGTH)))
        assert_close(other[:, :5], logits[:, :5])
        assert bool(((other - logits)[:, 5:].abs().amax(-1) > 1e-6)[:, :3].all())

    def test_all_memories_equal_one_masked_run_over_tokens_and_registers_each(self):
        teacher, inputs, count = tiny_teacher("causal", context_length=4), random_tokens(2, 9), 2
        encoder, stack = teacher.encoder, teacher.encoder.stack
        assert isinstance(encoder, CausalEncoder)
        memories = encoder(inputs, steps_of(*range(LENGTH)), teacher.embedding).memory
        for t in range(LENGTH):
            length = t + 1 + count
            x = torch.cat(
                [teacher.embedding(inputs[:, : t + 1]), encoder.registers.expand(ROWS, -1, -1)], 1
            )
            seen = torch.zeros(length, length, dtype=torch.bool)
            for i in range(t + 1):
                seen[i, max(0, i - 3) : i + 1] = True
            seen[t + 1 :, max(0, t - 3) :] = True
            for block in stack.blocks:
                query, key, value = block.attention.qkv(block.attention_norm(x))
                query, key = (stack.rotary(part, torch.arange(length)) for part in (query, key))
                mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
                x = torch.add(*block.finish(x, block.attention.merge(mixed)))
            expected = encoder.to_memory(stack.norm(x[:, -count:]))
            assert_close(memories[:, t], expected, atol=1e-5, rtol=0)


def encode_plainly(encoder: CausalEncoder, inputs: Tensor, steps: Tensor, embedding: nn.Embedding):
    """The causal encoder written otherwise: tokens and registers apart, attention by einsum."""
    length, count, rotary = inputs.shape[1], len(encoder.registers), encoder.stack.rotary
    time = torch.arange(length)
    age = time[:, None] - time
    token_mask = (age >= 0) & (age < encoder.context_length)
    register_mask = token_mask[steps] & (steps >= 0)[..., None]  # (B, S, T)
    own_positions = steps[..., None] + 1 + torch.arange(count)  # (B, S, M)
    tokens, before = embedding(inputs), embedding(inputs)
    registers = encoder.registers.expand(*steps.shape, -1, -1)  # (B, S, M, W)
    for block in encoder.stack.blocks:
        assert isinstance(block, Block)
        before = tokens
        query, key, value = block.attention.qkv(block.attention_norm(tokens))
        query, key = rotary(query, time), rotary(key, time)
        own_query, own_key, own_value = block.attention.qkv(block.attention_norm(registers))
        own_query, own_key = rotary(own_query, own_positions), rotary(own_key, own_positions)
        past = torch.einsum("bshme,bhte->bhsmt", own_query, key)
        past = past.masked_fill(~register_mask[:, None, :, None], float("-inf"))
        own = torch.einsum("bshme,bshne->bhsmn", own_query, own_key)
        scores = torch.cat([past, own], dim=-1) / math.sqrt(block.attention.head_dim)
        past, own = scores.softmax(dim=-1).split([length, count], dim=-1)
        mixed = torch.einsum("bhsmt,bhte->bshme", past, value)
        mixed = mixed + torch.einsum("bhsmn,bshne->bshme", own, own_value)
        registers = torch.add(*block.finish(registers, block.attention.merge(mixed)))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=token_mask)
        tokens = torch.add(*block.finish(tokens, block.attention.merge(mixed)))
    return EncoderOutput(encoder.to_memory(encoder.stack.norm(registers)), before)


@pytest.mark.parametrize("rows", [2048, 1], ids=["at-once", "in-chunks"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 9, 6), (2, 1, 8, 9, 6), (2, 3, 12, 2, 7), (3, 2, 8, 3, 9)],
    ids=lambda shape: "L{}-M{}-D{}-C{}-T{}".format(*shape),
)
def test_causal_memories_and_gradients_equal_those_of_the_plain_formulas(shape, rows, monkeypatch):
    layers, memory_tokens, memory_dim, context, length = shape
    monkeypatch.setattr(teacher_module, "MAX_ROWS", rows)
    config = tiny_config("causal", context_length=context, encoder_layers=layers, head_dim=6)
    teacher = Teacher(config, 5, memory_tokens, memory_dim).double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=seeded()))
    encoder = teacher.encoder
    assert isinstance(encoder, CausalEncoder)
    assert isinstance(teacher.embedding, nn.Embedding)
    inputs = torch.randint(5, (4, length), generator=seeded())
    steps = torch.randint(-1, length, (4, 5), generator=seeded())
    found = encoder(inputs, steps, teacher.embedding)
    expected = encode_plainly(encoder, inputs, steps, teacher.embedding)
    wanted = [teacher.embedding.weight, *encoder.parameters()]
    for ours, theirs in zip(found, expected, strict=True):  # memories, and the tokens' states
        assert ours is not None and theirs is not None
        assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
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
            assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


class TestDecoder:
    memory = torch.randn(3, 2, 16, generator=seeded())
    future = random_tokens(3, 5)

    @pytest.mark.parametrize("changed", range(5))
    def test_future_input_k_changes_the_logits_after_it_and_none_before(self, changed):
        teacher, other = tiny_teacher(), self.future.clone()
        other[:, changed] = other_token(self.future[:, changed])
        before = teacher.decode(self.memory, self.future)
        after = teacher.decode(self.memory, other)
        # Logit k has read the inputs 0..k-1.
        assert_close(after[:, : changed + 1], before[:, : changed + 1])
        assert ((after - before)[:, changed + 1 :].abs().amax(-1) > 1e-4).all()

    def test_first_logits_come_from_the_memory_alone(self):
        teacher = tiny_teacher()
        logits = teacher.decode(self.memory, self.future)
        assert logits.shape == (3, 6, VOCAB)
        assert_close(logits[:, 0], teacher.predict(self.memory))

    def test_shorter_futures_give_the_same_first_logits(self):
        teacher = tiny_teacher()
        logits = teacher.decode(self.memory, self.future)
        for k in range(5):
            assert_close(teacher.decode(self.memory, self.future[:, :k]), logits[:, : k + 1])

    def test_selected_targets_have_the_logits_of_the_full_run(self):
        teacher = tiny_teacher()
        positions = torch.tensor([[0, 5], [2, 1], [4, 4]])
        logits = teacher.decode(self.memory, self.future, positions)
        full = teacher.decode(self.memory, self.future)
        assert_close(logits, full[torch.arange(3)[:, None], positions])

    @pytest.mark.parametrize("token", [0, 1])
    def test_every_memory_token_matters_to_every_prediction(self, token):
        teacher, other = tiny_teacher(), self.memory.clone()
        other[:, token] += torch.randn(16, generator=seeded(1))
        change = teacher.decode(other, self.future) - teacher.decode(self.memory, self.future)
        assert (change.abs().amax(-1) > 1e-4).all()

    def test_bidirectional_readout_lets_the_first_memory_token_attend_to_the_last(self):
        torch.manual_seed(0)
        causal = Decoder(tiny_config(), VOCAB, 16)
        bidirectional = Decoder(tiny_config(), VOCAB, 16, causal=False)
        bidirectional.load_state_dict(causal.state_dict())
        assert bidirectional(self.memory).shape == (3, 1, VOCAB)
        assert (bidirectional(self.memory) - causal(self.memory)).abs().max() > 1e-4


class TestTeacher:
    @BOTH
    def test_encoder_and_decoder_share_one_embedding(self, encoder):
        teacher = tiny_teacher(encoder)
        embeddings = [m for m in teacher.modules() if isinstance(m, nn.Embedding)]
        assert embeddings == [teacher.embedding]
        memory = teacher.encode(random_tokens(2, 5))
        assert receives_gradient(memory.sum(), teacher.embedding)
        logits = teacher.decode(memory[:, 0].detach(), random_tokens(2, 3))
        assert receives_gradient(logits.sum(), teacher.embedding)

    @BOTH
    @pytest.mark.parametrize("memory_dim", [16, 12], ids=lambda d: f"D{d}")
    def test_parameters_counted_by_hand(self, encoder, memory_dim):
        width, inner, layers, memory_tokens = 16, 2 * 8, 2, 2
        mlp = (width * 4 * width + 4 * width) + (4 * width * width + width)
        block = 4 * width * inner + mlp + 2 * width
        stack = layers * block + width
        between = width * memory_dim if memory_dim != width else 0
        expected = VOCAB * width  # the embedding, once
        expected += memory_tokens * width + stack + between  # encoder
        expected += between + stack + width * VOCAB  # decoder
        teacher = tiny_teacher(encoder, memory_tokens=memory_tokens, memory_dim=memory_dim)
        assert sum(p.numel() for p in teacher.parameters()) == expected

    def test_default_size_is_that_of_the_paper(self):
        teacher = Teacher(TeacherConfig(), vocab_size=256, memory_tokens=16, memory_dim=256)
        assert 12.6e6 < sum(p.numel() for p in teacher.parameters()) < 12.8e6
