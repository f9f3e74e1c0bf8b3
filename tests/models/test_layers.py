import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from conftest import seeded
from memtrain.models.layers import (
    Attention,
    Block,
    Lookup,
    Rotary,
    Stack,
    _Lookup,
    evaluation_mode,
    gather_positions,
    normalize_memory,
    projection,
    residual,
    table_gradient,
)

WIDTH, HEADS, HEAD_DIM, LENGTH = 16, 2, 8, 7


def tiny_stack(layers: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(WIDTH, layers, HEADS, HEAD_DIM)


def rows(count: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randn(count, length, WIDTH, generator=seeded())


def sparse_mask(count: int = 3, length: int = LENGTH) -> Tensor:
    """Some positions hidden; the first is seen, so that a causal row always sees something."""
    mask = torch.rand(count, length, generator=seeded(1)) < 0.6
    mask[:, 0] = True
    assert not mask.all()
    return mask


class Merged(nn.Module):
    """A part that changes its weights when its mode changes, as adapters that are merged do."""

    merged = False

    def train(self, mode: bool = True) -> "Merged":
        self.merged = not mode
        return super().train(mode)


def test_evaluation_mode_ends_in_the_modes_before_it_also_after_an_error():
    inner, merged = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), Merged()
    model = nn.Sequential(inner, merged)
    inner.eval()
    inner[1].train()
    before = [part.training for part in model.modules()]
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        assert not any(part.training for part in model.modules()) and merged.merged
        raise ZeroDivisionError
    assert [part.training for part in model.modules()] == before and not merged.merged


class TestRotary:
    query, key = torch.randn(2, 1, HEADS, 6, HEAD_DIM, generator=seeded())

    def scores(self, positions: Tensor) -> Tensor:
        rotary = Rotary(HEAD_DIM)
        return rotary(self.query, positions) @ rotary(self.key, positions).mT

    @pytest.mark.parametrize("shift", [1, 50, 500])
    def test_scores_depend_on_position_differences_only(self, shift):
        positions = torch.tensor([0, 1, 3, 4, 8, 11])
        assert_close(self.scores(positions + shift), self.scores(positions), atol=1e-4, rtol=0)

    def test_scores_change_with_position_differences(self):
        near, far = torch.arange(6), 2 * torch.arange(6)
        off_diagonal = ~torch.eye(6, dtype=torch.bool)
        change = (self.scores(far) - self.scores(near)).abs()[..., off_diagonal]
        assert (change > 1e-3).float().mean() > 0.9

    def test_rotates_every_pair_by_its_own_angle(self):
        positions = torch.tensor([0, 1, 2, 30, 31, 200])
        half = HEAD_DIM // 2
        angle = positions[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        pairs = torch.complex(self.query[..., :half], self.query[..., half:])
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        assert_close(Rotary(HEAD_DIM)(self.query, positions), expected, atol=1e-4, rtol=0)

    def test_a_fraction_rotates_the_first_pairs_with_frequencies_of_that_many_channels(self):
        positions = torch.tensor([0, 1, 2, 30, 31, 200])
        half, rotated = HEAD_DIM // 2, HEAD_DIM // 4
        rotary = Rotary(HEAD_DIM, 0.5)
        turned = rotary(self.query, positions).unflatten(-1, (2, half))
        plain = self.query.unflatten(-1, (2, half))
        assert torch.equal(turned[..., rotated:], plain[..., rotated:])
        small = Rotary(HEAD_DIM // 2)(plain[..., :rotated].flatten(-2), positions)
        assert torch.equal(turned[..., :rotated].flatten(-2), small)
        for cosine, sine in (rotary.tables(torch.float32), rotary.tables(torch.bfloat16)):
            assert cosine[:, rotated:].eq(1).all() and sine[:, rotated:].eq(0).all()

    def test_a_fraction_of_0_rotates_nothing(self):
        assert torch.equal(Rotary(HEAD_DIM, 0.0)(self.query, torch.arange(6)), self.query)

    def test_rows_may_have_separate_positions(self):
        rotary = Rotary(HEAD_DIM)
        x = torch.randn(2, 3, HEADS, 4, HEAD_DIM, generator=seeded())
        positions = torch.randint(50, (2, 3, 4), generator=seeded(1))
        turned = rotary(x, positions)
        for i in range(2):
            for j in range(3):
                assert_close(turned[i, j], rotary(x[i, j], positions[i, j]))

    def test_growing_the_tables_changes_nothing(self):
        small, large = Rotary(HEAD_DIM, positions=4), Rotary(HEAD_DIM, positions=1000)
        before = small.cosine.clone(), small.sine.clone()
        for positions in (5, 600):
            small.reserve(positions)
            assert len(small.cosine) >= positions
            assert torch.equal(small.cosine[:4], before[0])
            assert torch.equal(small.sine[:4], before[1])
        assert torch.equal(small.cosine[:600], large.cosine[:600])
        assert torch.equal(small.sine[:600], large.sine[:600])

    def test_tables_never_shrink_and_are_not_saved(self):
        rotary = Rotary(HEAD_DIM, positions=9)
        rotary.reserve(3)
        assert len(rotary.cosine) == 9
        assert not rotary.state_dict()


class TestAttention:
    def test_block_equals_attention_written_out_head_by_head(self):
        torch.manual_seed(0)
        block, rotary, x = Block(WIDTH, HEADS, HEAD_DIM), Rotary(HEAD_DIM), rows(1)
        positions = torch.arange(LENGTH)
        normed = block.attention_norm(x)[0]
        queries, keys, values = block.attention.project_in.weight.chunk(3)
        heads = []
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            query = rotary((normed @ queries[own].T)[None], positions)[0]
            key = rotary((normed @ keys[own].T)[None], positions)[0]
            weights = (query @ key.T / math.sqrt(HEAD_DIM)).softmax(-1)
            heads.append(weights @ (normed @ values[own].T))
        y = x[0] + torch.cat(heads, dim=1) @ block.attention.project_out.weight.T
        expected = y + block.mlp(block.mlp_norm(y))
        for keep in (None, slice(None)):
            assert_close(torch.add(*block(x, None, rotary, keep))[0], expected)
            halves = block(x / 2, x / 2, rotary, keep)
            assert_close(torch.add(*halves)[0], expected)

    def test_inner_width_is_independent_of_the_outer_one(self):
        attention = Attention(width=10, heads=3, head_dim=4)
        query, key, value = attention.qkv(torch.randn(2, 5, 10))
        assert query.shape == key.shape == value.shape == (2, 3, 5, 4)
        assert attention.merge(value).shape == (2, 5, 10)


def composed(stack: Stack, x: Tensor, keep: slice | Tensor | None, causal: bool) -> Tensor:
    """The stack written out, every sum where the formula has it."""
    *inner, last = stack.blocks
    x = residual(x)
    for block in (*inner, last):
        assert isinstance(block, Block)
        kept = keep if block is last else None
        attended = block.attention(block.attention_norm(x), stack.rotary, kept, causal)
        x = (x if kept is None else gather_positions(x, kept)) + attended
        x = x + block.mlp(block.mlp_norm(x))
    return stack.norm(x.float())


class TestStack:
    @pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize(
        "keep",
        [None, slice(-2, None), torch.tensor([[0, 6], [3, 3], [5, 1]])],
        ids=["all", "last-2", "own"],
    )
    @pytest.mark.parametrize("layers", [1, 3], ids=["L1", "L3"])
    def test_deferred_residual_updates_are_bit_exact(self, layers, keep, causal, bf16):
        stack, x = tiny_stack(layers), rows().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outs = stack(x, queries=keep, causal=causal), composed(stack, x, keep, causal)
        assert torch.equal(*outs)
        learned = [x, *stack.parameters()]
        for pair in zip(*(torch.autograd.grad(o.pow(3).sum(), learned) for o in outs), strict=True):
            assert torch.equal(*pair)

    def test_names_of_weights_are_those_of_checkpoints(self):
        block = ["attention_norm.weight", "attention.project_in.weight"]
        block += ["attention.project_out.weight", "mlp_norm.weight"]
        block += [f"mlp.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")]
        assert list(tiny_stack(1).state_dict()) == [
            *(f"blocks.0.{n}" for n in block),
            "norm.weight",
        ]

    @pytest.mark.parametrize("masked", [False, True], ids=["all-seen", "mask"])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize(
        "keep",
        [slice(-2, None), slice(3), slice(4, 5), slice(None)],
        ids=["last-2", "first-3", "one", "all"],
    )
    @pytest.mark.parametrize("layers", [1, 2], ids=["L1", "L2"])
    def test_keeping_some_positions_gives_their_rows_of_the_full_run(
        self, layers, keep, causal, masked
    ):
        stack, x = tiny_stack(layers), rows()
        mask = sparse_mask() if masked else None
        full = stack(x, queries=slice(None), causal=causal, mask=mask)
        assert_close(stack(x, queries=keep, causal=causal, mask=mask), full[:, keep])

    @pytest.mark.parametrize("masked", [False, True], ids=["all-seen", "mask"])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("layers", [1, 2], ids=["L1", "L2"])
    def test_rows_may_keep_separate_positions(self, layers, causal, masked):
        stack, x = tiny_stack(layers), rows()
        mask = sparse_mask() if masked else None
        keep = torch.tensor([[0, 6], [3, 3], [5, 1]])
        full = stack(x, causal=causal, mask=mask)
        kept = stack(x, queries=keep, causal=causal, mask=mask)
        assert_close(kept, full[torch.arange(3)[:, None], keep])

    @pytest.mark.parametrize("masked", [False, True], ids=["all-seen", "mask"])
    @pytest.mark.parametrize("changed", range(1, LENGTH))
    def test_causal_positions_do_not_see_what_comes_later(self, changed, masked):
        stack, x, mask = tiny_stack(), rows(), sparse_mask() if masked else None
        other = x.clone()
        other[:, changed:] += 1
        before = stack(x, queries=slice(None), causal=True, mask=mask)
        after = stack(other, queries=slice(None), causal=True, mask=mask)
        assert_close(after[:, :changed], before[:, :changed])
        assert ((after - before)[:, changed:].abs().amax(-1) > 1e-3).all()

    def test_causal_positions_see_everything_before_them(self):
        stack, x = tiny_stack(), rows()
        other = x.clone()
        other[:, 0] += 1
        change = stack(other, queries=slice(None), causal=True) - stack(
            x, queries=slice(None), causal=True
        )
        assert (change.abs().amax(-1) > 1e-4).all()

    def test_without_causal_the_last_position_reaches_the_first(self):
        stack, x = tiny_stack(), rows()
        other = x.clone()
        other[:, -1] += 1
        change = stack(other, queries=slice(1)) - stack(x, queries=slice(1))
        assert (change.abs().amax(-1) > 1e-4).all()

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_masked_positions_do_not_affect_others(self, causal):
        stack, x, mask = tiny_stack(), rows(), sparse_mask()
        other = torch.where(mask[..., None], x, x + 5)
        before = stack(x, queries=slice(None), causal=causal, mask=mask)
        after = stack(other, queries=slice(None), causal=causal, mask=mask)
        assert_close(after[mask], before[mask])

    def test_rows_longer_than_the_table_equal_those_under_a_large_table(self):
        stack, large = tiny_stack(), tiny_stack()
        stack.rotary = Rotary(HEAD_DIM, positions=2)
        assert_close(stack(rows(), queries=slice(None)), large(rows(), queries=slice(None)))

    def test_one_position_needs_no_mask(self):
        stack, x = tiny_stack(), rows(length=1)
        assert_close(stack(x, queries=slice(None), causal=True), stack(x, queries=slice(None)))


def test_normalize_memory_scales_every_token_to_rms_1():
    memory = 3 * torch.randn(4, 5, 2, 16, generator=seeded())
    scaled = normalize_memory(memory)
    assert_close(scaled.square().mean(-1), torch.ones(4, 5, 2), atol=1e-5, rtol=0)
    ratio = memory / scaled
    assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_projection_between_equal_widths_has_no_parameters():
    assert not list(projection(8, 8).parameters())
    assert [p.shape for p in projection(8, 5).parameters()] == [(5, 8)]


def test_matrix_product_equals_the_gradient_of_the_lookup():
    """It runs on GPUs alone, but is the same anywhere."""
    tokens = torch.randint(9, (5, 7))
    table = torch.randn(9, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(5, 7, 4, dtype=torch.double)
    rows, expected = _Lookup.apply(table, tokens, table_gradient), F.embedding(tokens, table)
    assert_close(rows, expected)
    (got,) = torch.autograd.grad((rows * weight).sum(), table)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), table)
    assert_close(got, wanted)


def test_rows_have_the_dtype_of_the_residual_stream():
    table, tokens = nn.Embedding(9, 4), torch.randint(9, (3,))
    assert_close(Lookup()(table.weight, tokens), table(tokens))
    with torch.autocast("cpu", torch.bfloat16):
        assert Lookup()(table.weight, tokens).dtype == torch.bfloat16
