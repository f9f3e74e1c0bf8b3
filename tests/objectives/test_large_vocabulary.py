"""The loss of a large vocabulary in chunks: equal to the plain one, without holding its logits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import VOCAB, gradients, random_batch, seeded, tiny_cell, tiny_rnn, tiny_teacher
from memtrain.accel.cpu_decoder import VocabProjectedDecoder
from memtrain.config import BPTTConfig, CellConfig, DMTConfig, SMTConfig
from memtrain.errors import MemtrainError
from memtrain.evaluation.scores import ScoreAccumulator
from memtrain.models.attention import AttentionCell, AttentionReadout
from memtrain.models.cells import build_cell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder, Teacher
from memtrain.objectives.base import Exchanged, MicroBatchShard, Objective
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.futures import decode_futures
from memtrain.objectives.large_vocabulary import (
    LOGITS_AT_ONCE,
    LargeLogits,
    _SummedLoss,
    has_many_logits,
    summed_loss,
)
from memtrain.objectives.smt import SMT, Pretrain
from memtrain.runs.distributed import ALONE
from memtrain.shapes import IGNORE_INDEX, Batch, Values

CPU = torch.device("cpu")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two to three positions of a small vocabulary per chunk."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 3 * VOCAB - 1)


class Observed(TorchDispatchMode):
    """Notes all operations, also of backward, and the most numbers in a tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        self.operations.add(str(func))
        return result


def plain_loss(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """The reference: all logits at once."""
    logits = head(hidden).flatten(0, -2)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def example(
    positions: int = 41, bias: bool = True, asked: float = 0.7, vocab: int = VOCAB
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states (positions, 16) and targets, some of them missing."""
    torch.manual_seed(0)
    head = nn.Linear(16, vocab, bias=bias)
    hidden = torch.randn(positions, 16, requires_grad=True)
    targets = torch.randint(vocab, (positions,))
    return head, hidden, targets.where(torch.rand(positions) < asked, IGNORE_INDEX)


def assert_near(found: Tensor, expected: Tensor, relative: float = 1e-6) -> None:
    """Equal up to this share of the expected tensor's norm."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    distance = (found.double() - expected.double()).norm()
    assert distance <= relative * expected.double().norm() + 1e-12


def assert_equal_losses(
    found: Callable[[], Tensor], expected: Callable[[], Tensor], inputs: list[Any]
) -> None:
    """The same loss and gradients within 1e-6."""
    losses = found(), expected()
    assert_near(losses[0], losses[1])
    for one, other in zip(*(gradients(loss, inputs) for loss in losses), strict=True):
        assert_near(one, other)


# ------------------------------------------------------------------------------ the sum alone


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("asked", [1.0, 0.7, 0.05, 0.0])
@pytest.mark.parametrize("positions", [1, 2, 41])
def test_equals_the_cross_entropy_of_all_logits(positions, asked, bias):
    head, hidden, targets = example(positions, bias, asked)
    assert_equal_losses(
        lambda: summed_loss(head, hidden, targets),
        lambda: plain_loss(head, hidden, targets),
        [hidden, *head.parameters()],
    )


@pytest.mark.usefixtures("small_chunks")
def test_most_tokens_are_no_target_in_a_chunk_or_anywhere():
    head, hidden, targets = example()
    targets = targets.clamp(max=VOCAB // 2)  # the others are never a target
    assert all(len(chunk.unique()) < VOCAB // 2 for chunk in targets.split(2))
    assert_equal_losses(
        lambda: summed_loss(head, hidden, targets),
        lambda: plain_loss(head, hidden, targets),
        [hidden, *head.parameters()],
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_gradients_are_the_derivatives(bias):
    head, hidden, targets = example(9, bias)
    weights = [one.detach().double().requires_grad_() for one in head.parameters()]

    def loss(hidden: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(["weight", "bias"], weights, strict=False))
        shell = Shell(head)
        return torch.func.functional_call(
            shell, {f"head.{name}": one for name, one in named.items()}, (hidden, targets)
        )

    assert torch.autograd.gradcheck(loss, (hidden.detach().double().requires_grad_(), *weights))


class Shell(nn.Module):
    """Calls `summed_loss`, so that weights can be replaced."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(self.head, hidden, targets)


@pytest.mark.usefixtures("small_chunks")
def test_under_autocast_it_is_as_near_to_fp32_as_the_plain_loss_is():
    head, hidden, targets = example(400)
    inputs: list[Any] = [hidden, *head.parameters()]
    exact = gradients(plain_loss(head, hidden, targets), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss(head, hidden, targets) for loss in (summed_loss, plain_loss)]
    assert_near(losses[0], losses[1])  # the logits have the same 16 bits
    chunked, plain = (gradients(loss, inputs) for loss in losses)
    for one, other, wanted in zip(chunked, plain, exact, strict=True):
        assert one.dtype == torch.float32
        assert 0 < (one - wanted).norm() < 1.2 * (other - wanted).norm()


@pytest.mark.usefixtures("small_chunks")
def test_weights_that_were_cast_before_get_gradients_of_their_precision():
    head, hidden, targets = example(40)  # as accel/cuda_graphs.py casts them
    cast = nn.Linear(16, VOCAB)
    cast.weight = nn.Parameter(head.weight.detach().bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(cast, hidden, targets)
        expected = plain_loss(cast, hidden, targets)
    assert_near(loss, expected)
    inputs: list[Any] = [hidden, *cast.parameters()]
    both = gradients(loss, inputs), gradients(expected, inputs)
    for one, other in zip(*both, strict=True):
        assert_near(one, other, 1e-2)


@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_scaled_and_can_be_taken_twice():
    head, hidden, targets = example()
    inputs: list[Any] = [hidden, *head.parameters()]
    once = gradients(summed_loss(head, hidden, targets), inputs)
    loss = 3 * summed_loss(head, hidden, targets)
    for _ in range(2):  # `gradients` retains the graph
        for one, other in zip(gradients(loss, inputs), once, strict=True):
            assert_near(one, 3 * other)


@pytest.mark.usefixtures("small_chunks")
def test_second_derivatives_are_refused():
    head, hidden, targets = example()
    loss = summed_loss(head, hidden, targets)
    with pytest.raises(MemtrainError, match="loss of many logits has no second derivatives; take"):
        torch.autograd.grad(loss, head.weight, create_graph=True)


@pytest.mark.usefixtures("small_chunks")
def test_only_what_is_trained_gets_a_gradient():
    head, hidden, targets = example()
    with torch.no_grad(), Observed() as seen:
        assert not summed_loss(head, hidden, targets).requires_grad
    assert "aten.nll_loss_forward.default" in seen.operations
    assert "aten.exp_.default" not in seen.operations  # no gradient is computed
    head.requires_grad_(False)
    assert_equal_losses(
        lambda: summed_loss(head, hidden, targets),
        lambda: plain_loss(head, hidden, targets),
        [hidden],
    )
    assert not summed_loss(head, hidden.detach(), targets).requires_grad


def test_nothing_is_read_on_the_host():
    # As in a CUDA graph. A tensor without values cannot be read.
    head, hidden, targets = example(vocab=2**21)
    head, hidden, targets = head.to("meta"), hidden.detach().to("meta"), targets.to("meta")
    hidden.requires_grad_()
    inputs = (hidden, head.weight, head.bias, targets)
    _SummedLoss.apply(*inputs, torch.float32, (True, True, True)).backward()
    assert hidden.grad is not None and head.weight.grad is not None
    assert head.weight.grad.shape == (2**21, 16)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_target_outside_the_vocabulary_is_refused(wrong):
    head, hidden, targets = example()
    targets[30] = wrong
    with pytest.raises(MemtrainError, match=rf"targets={wrong}: must be 0..{VOCAB - 1}"):
        summed_loss(head, hidden, targets)


def test_small_batches_and_numbers_are_not_split():
    paper = 128 * 256  # positions of its BPTT batch, the largest
    assert not has_many_logits(paper, 256, CPU)
    assert has_many_logits(paper + 1, 256, CPU)
    assert has_many_logits(168, 50_257, CPU)
    assert not has_many_logits(10**9, Values(features=3), CPU)
    batch, teacher = random_batch(3, 6), tiny_teacher("causal")
    decoded = decode_futures(teacher, batch, teacher.encode(batch.inputs), steps(batch), 3)
    assert isinstance(decoded.outputs, Tensor)


def steps(batch: Batch) -> Tensor:
    return torch.arange(batch.inputs.shape[1]).expand(batch.inputs.shape)


# ------------------------------------------------------------------------------- all objectives


def smt(kind: type[SMT] = SMT, fast: bool = False, **options: Any) -> SMT:
    teacher = tiny_teacher("causal", head_bias=True)
    if fast:
        teacher.fast = VocabProjectedDecoder()
    settings = {"future_length": 3, "timesteps": 0, "next_weight": 0.3, **options}
    return kind(teacher, tiny_rnn(head_bias=True), SMTConfig(**settings))


def dmt(**options: Any) -> DMT:
    teacher = tiny_teacher("causal")
    return DMT(teacher, tiny_rnn(), DMTConfig(decode_weight=1.0, future_length=3, **options))


def attention() -> RNN:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(width=16, layers=1, heads=2, head_dim=8, memory_tokens=4)
    cell = AttentionCell(CellConfig(kind="attention", **sizes), VOCAB)
    return RNN(cell, AttentionReadout(16, VOCAB))


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "smt": smt,
    "smt-fast": lambda: smt(fast=True),
    "smt-tokens": lambda: smt(token_weight=0.5),
    "pretrain": lambda: smt(Pretrain),
    "dmt": dmt,
    "dmt-teacher": lambda: dmt(train_teacher=True, segment=2),
    "bptt": lambda: BPTT(tiny_rnn()),
    "bptt-recomputed": lambda: BPTT(tiny_rnn(), BPTTConfig(recompute=2, truncate=4)),
    "bptt-gru": lambda: BPTT(tiny_rnn(tiny_cell("gru"))),
    "bptt-attention": lambda: BPTT(attention()),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_give_the_same_losses_and_gradients(name, precision, monkeypatch):
    objective, batch = OBJECTIVES[name](), random_batch(4, 6)
    taken, close = 0, 2e-6 if precision == "fp32" else 2e-2

    def counted(*given: Any, **named: Any) -> Tensor:
        nonlocal taken
        taken += 1
        return summed_loss(*given, **named)

    def losses(at_once: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
        autocast = torch.autocast("cpu", torch.bfloat16)
        with autocast if precision == "bf16" else nullcontext():
            found = objective(batch, seeded())
        trained = objective.trained_parameters()
        return found.parts | {"total": found.total}, gradients(found.total, trained)

    monkeypatch.setattr("memtrain.objectives.large_vocabulary.summed_loss", counted)
    expected, wanted = losses(2**23)
    assert taken == 0
    found, chunked = losses(3 * VOCAB)
    assert taken > 0
    for part, value in expected.items():
        assert_near(found[part], value, 1e-6)
    for one, other in zip(chunked, wanted, strict=True):
        assert_near(one, other, close)


def test_micro_batches_share_the_mean(monkeypatch):
    batch, rnn = random_batch(4, 6, target_rate=0.3), tiny_rnn()
    expected = gradients(BPTT(rnn)(batch).total, rnn.parameters())
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 3 * VOCAB)
    exchanged, objective = Exchanged([[], []]), BPTT(rnn)
    for recording in (True, False):
        exchanged.recording = recording
        for index in range(2):
            objective.shard = shard = MicroBatchShard(ALONE, index, exchanged)
            loss = objective(batch.map(shard.rows), seeded()).total
            if not recording:
                loss.backward()
    for parameter, wanted in zip(rnn.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_near(parameter.grad, wanted, 2e-6)


# -------------------------------------------------------------------------------------- memory


LARGE = 3000
"""A vocabulary that is large beside the models' width of 16."""


def large_objective(name: str) -> Objective:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(width=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
    teacher = Teacher(vocab_size=LARGE, memory_tokens=2, encoder="causal", **sizes)
    rnn = RNN(build_cell(CellConfig(kind="gru", memory_tokens=2, memory_dim=16), LARGE), teacher)
    if name == "smt":
        return SMT(teacher, rnn, timesteps=0, future_length=4)
    if name == "dmt":
        return DMT(teacher, rnn, decode_weight=1.0, future_length=4)
    return BPTT(rnn)


@pytest.mark.parametrize("name", ["smt", "dmt", "bptt"])
def test_no_tensor_of_a_step_has_the_size_of_all_logits(name, monkeypatch):
    objective = large_objective(name)
    tokens = torch.randint(LARGE, (8, 16), generator=seeded())
    weight = LARGE * 3 * 16  # the largest table, of a GRU's inputs

    def largest(at_once: int) -> int:
        monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
        saved = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved = max(saved, tensor.numel())
            return tensor

        with Observed() as seen, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            objective(tokens, seeded()).total.backward()
        return max(seen.largest, saved)

    logits = 8 * 15 * LARGE  # at least, one per target
    assert largest(2**30) >= logits > 2 * weight
    assert largest(10 * LARGE) <= weight


def test_an_evaluation_decodes_a_bounded_number_of_positions(monkeypatch):
    rnn, batch = tiny_rnn(), random_batch(6, 5)
    memories = torch.randn(6, 5, 2, 16, generator=seeded())
    scores = []
    for at_once, most in ((2**23, 30), (4 * VOCAB, 4)):
        monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
        rows: list[int] = []

        def predict(part: Tensor, rows: list[int] = rows) -> Tensor:
            rows.append(len(part))
            return rnn.predict(part)

        tally = ScoreAccumulator(5, CPU, VOCAB)
        with torch.no_grad():
            tally.add(predict, memories, batch.targets)
        assert max(rows) == most and sum(rows) == 30
        scores.append(tally.score())
    assert scores[0].nats == pytest.approx(scores[1].nats, rel=1e-6)
    assert scores[0].accuracy == scores[1].accuracy


def test_hidden_states_are_what_the_head_makes_logits_of():
    teacher, rnn, batch = tiny_teacher("causal", head_bias=True), tiny_rnn(), random_batch(3, 6)
    memory = teacher.encode(batch.inputs)[:, 2]
    pairs = [
        (teacher, teacher.decode, (memory, batch.inputs[:, 3:])),
        (rnn, rnn.predict, (rnn.unroll(batch.inputs),)),
    ]
    for model, predict, given in pairs:
        decoder = model.decoder if isinstance(model, Teacher) else model.readout
        assert isinstance(decoder, Decoder)
        hidden = LargeLogits(predict(*given, hidden=True), decoder)
        assert_close(decoder.head(hidden.hidden), predict(*given))
        assert_close(decoder.head(hidden[:, :1].hidden), predict(*given)[:, :1])
