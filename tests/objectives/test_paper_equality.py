"""The paper's models and losses, written independently in plain torch: equal outputs and gradients.

The reference follows the paper's equations, its architecture appendix and its algorithm appendix,
with what only the authors' code settles: half of each head is rotated (in pairs of neighbouring
channels), the output head has a bias, the uniformity loss compares tokens of m_t of unit length.
It goes one sequence and one timestep at a time and uses nothing of memtrain but the weights.
`Details` lists what could be different; changing any of it must show.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.config import BPTTConfig, CellConfig, DMTConfig, SMTConfig, TeacherConfig
from memtrain.models.cells import build_cell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder, Teacher
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.dmt import DMT
from memtrain.objectives.smt import SMT
from memtrain.shapes import IGNORE_INDEX, Batch, Losses

VOCAB, ROWS, LENGTH, CONTEXT, FUTURE = 5, 3, 6, 4, 3
TOKENS, WIDTH, HEADS, HEAD_DIM = 3, 12, 2, 8
DECODE, DYNAMICS, UNIFORMITY = 1.0, 0.5, 0.25  # weights of one order, so that each loss counts
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Tables of angles and losses are fp32 in memtrain whatever the models' precision."""
EPSILON = 1e-6
"""Of memtrain's RMSNorm; the authors' blocks have none."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Details:
    """What the paper and the authors' code have; every other value must give other numbers."""

    rotated: int = HEAD_DIM // 2
    """Channels of a head that are rotated."""
    frequencies_over: int = HEAD_DIM // 2
    """r in 10000^(-2i/r)."""
    neighbours: bool = True
    """Pairs of channels 2i and 2i + 1."""
    head_bias: bool = True
    exact_gelu: bool = True
    normed_memory: bool = True
    causal_decoder: bool = True
    causal_readout: bool = True
    last_memory_token: bool = True
    """The first target is predicted at the last memory token."""
    unit_tokens: bool = True
    m_t_alone: bool = True
    """The uniformity loss without m_{t+1}."""
    other_pairs: bool = True
    """The uniformity loss without pairs of a token with itself."""
    moving_label: bool = True
    """Joint dynamics reach m_{t+1} too."""
    one_step: bool = True
    """DMT's rollout is detached at every step."""
    task_loss_of_readout: bool = True
    """DMT's task loss does not train the cell."""
    stacked_gru: bool = True
    """Layer l > 1 of the GRU reads the new state of the layer below."""


# ---------------------------------------------------------------------------- the paper's models


@dataclass(frozen=True)
class Reference:
    """The models of the architecture appendix, from the weights of memtrain's."""

    teacher: Weights
    cell: Weights
    readout: Weights
    kind: str
    details: Details

    def norm(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
        return scaled if gain is None else scaled * gain

    def rotate(self, x: Tensor) -> Tensor:
        """RoPE on (positions, HEAD_DIM)."""
        r, d = self.details.rotated, self.details
        exponent = torch.arange(0, r, 2, dtype=torch.float64) / d.frequencies_over
        position = torch.arange(len(x), dtype=torch.float64)
        angle = position[:, None] * 10_000.0**-exponent
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        if d.neighbours:
            left, right = x[:, 0:r:2], x[:, 1:r:2]
        else:
            left, right = x[:, : r // 2], x[:, r // 2 : r]
        turned = torch.stack([left * cos - right * sin, left * sin + right * cos], dim=-1)
        return torch.cat([turned.flatten(1), x[:, r:]], dim=1)

    def attention(self, x: Tensor, w: Weights, causal: bool) -> Tensor:
        """Multi-head attention over the positions of one sequence, (positions, WIDTH)."""
        query, key, value = w["attention.project_in.weight"].chunk(3)
        order = channel_order()
        heads = []
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            q = self.rotate(x @ query[own][order].T)
            k = self.rotate(x @ key[own][order].T)
            scores = q @ k.T / math.sqrt(HEAD_DIM)
            if causal:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            heads.append(scores.softmax(-1) @ (x @ value[own].T))
        return torch.cat(heads, dim=1) @ w["attention.project_out.weight"].T

    def gelu(self, x: Tensor) -> Tensor:
        if self.details.exact_gelu:
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def transformer(self, x: Tensor, w: Weights, causal: bool) -> Tensor:
        """Pre-norm blocks with RMSNorm, RoPE and a GELU MLP, and a last norm."""
        layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
        for layer in range(layers):
            b = inside(w, f"blocks.{layer}.")
            x = x + self.attention(self.norm(x, b["attention_norm.weight"]), b, causal)
            hidden = self.norm(x, b["mlp_norm.weight"]) @ b["mlp.0.weight"].T + b["mlp.0.bias"]
            x = x + self.gelu(hidden) @ b["mlp.2.weight"].T + b["mlp.2.bias"]
        return self.norm(x, w["norm.weight"])

    def encode(self, context: Tensor) -> Tensor:
        """E([x_0..x_t]): full attention over context and registers, which become the memory."""
        embedded = self.teacher["embedding.weight"][context[-CONTEXT:]]
        x = torch.cat([embedded, self.teacher["encoder.registers"]])
        memory = self.transformer(x, inside(self.teacher, "encoder.stack."), causal=False)[-TOKENS:]
        normed = self.details.normed_memory and self.kind != "gru"
        return self.norm(memory) if normed else memory

    def decode(self, memory: Tensor, future: Tensor) -> Tensor:
        """D(m_t, x_fut): the logits of y_t, which sees the memory alone, and of those after it."""
        x = torch.cat([memory, self.teacher["embedding.weight"][future]])
        w = inside(self.teacher, "decoder.")
        x = self.transformer(x, inside(w, "stack."), self.details.causal_decoder)
        first = TOKENS - 1 if self.details.last_memory_token else 0
        return self.logits(x[first : first + len(future) + 1], w)

    def read_out(self, memory: Tensor) -> Tensor:
        """g(m_t): the logits of y_t."""
        x = self.transformer(memory, inside(self.readout, "stack."), self.details.causal_readout)
        return self.logits(x[-1 if self.details.last_memory_token else 0], self.readout)

    def logits(self, x: Tensor, w: Weights) -> Tensor:
        bias = w["head.bias"] if self.details.head_bias else 0
        return x @ w["head.weight"].T + bias

    def step(self, memory: Tensor, token: Tensor) -> Tensor:
        """f(m_t, x_{t+1})."""
        w, embedded = self.cell, self.cell["embedding.weight"][token]
        if self.kind == "gru":
            return self.gru(memory, embedded)
        if self.kind == "mlp":
            x = torch.cat([memory.flatten(), embedded])
            layers = sorted({int(name.split(".")[1]) for name in w if name.startswith("mlp.")})
            for layer in layers:
                x = w[f"mlp.{layer}.weight"] @ x + w[f"mlp.{layer}.bias"]
                x = self.gelu(x) if layer != layers[-1] else x
            memory = x.reshape(TOKENS, WIDTH)
        else:
            x = torch.cat([memory, embedded[None]])
            memory = self.transformer(x, inside(w, "stack."), causal=False)[:TOKENS]
        return self.norm(memory) if self.details.normed_memory else memory

    def empty_memory(self) -> Tensor:
        return self.cell["embedding.weight"].new_zeros(TOKENS, WIDTH)

    def gru(self, memory: Tensor, below: Tensor) -> Tensor:
        """A stacked GRU (Cho et al.): layer l keeps memory token l; its output is not normed."""
        states, token = [], below
        for layer, state in enumerate(memory):
            w = inside(self.cell, f"layers.{layer}.")
            given = w["weight_ih"] @ below + w["bias_ih"]
            kept = w["weight_hh"] @ state + w["bias_hh"]
            (r_x, z_x, n_x), (r_h, z_h, n_h) = given.chunk(3), kept.chunk(3)
            reset, update = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
            new = (n_x + reset * n_h).tanh()
            states.append((1 - update) * new + update * state)
            below = states[-1] if self.details.stacked_gru else token
        return torch.stack(states)


def inside(weights: Weights, prefix: str) -> Weights:
    """The weights whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def channel_order() -> list[int]:
    """The channel of memtrain's head at each place of the authors'.

    They rotate the first half of a head in pairs (2i, 2i + 1), memtrain its first pairs
    (i, i + HEAD_DIM/2); scores do not depend on the order of channels.
    """
    half = HEAD_DIM // 2
    pairs = [channel for i in range(half // 2) for channel in (i, i + half)]
    return pairs + [channel for channel in range(HEAD_DIM) if channel not in pairs]


# ---------------------------------------------------------------------------- the paper's losses


def cross_entropy(logits: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Mean over all positions that carry a target, in nats."""
    pairs = [(x, int(y)) for x, y in zip(logits, targets, strict=True) if y != IGNORE_INDEX]
    return torch.stack([torch.logsumexp(x, 0) - x[y] for x, y in pairs]).mean()


def squared_error(predicted: list[Tensor], memories: list[Tensor]) -> Tensor:
    return (torch.stack(predicted) - torch.stack(memories)).pow(2).mean()


def uniformity(memories: list[Tensor], details: Details) -> Tensor:
    """log E exp(-2 |a - b|^2) over pairs of memory tokens."""
    tokens = [token for memory in memories for token in memory]
    if details.unit_tokens:
        tokens = [token / token.pow(2).sum().sqrt() for token in tokens]
    potentials = [
        (-2 * (a - b).pow(2).sum()).exp()
        for i, a in enumerate(tokens)
        for j, b in enumerate(tokens)
        if i != j or not details.other_pairs
    ]
    return torch.stack(potentials).mean().log()


def smt_parts(model: Reference, batch: Batch, steps: list[int], *, joint: bool) -> Weights:
    """L^dec, L^dyn and L^unif at timesteps `steps` (and to the one after each, if there is one)."""
    logits, targets, predicted, labels, current, after = [], [], [], [], [], []
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        memory = {t: model.encode(x[: t + 1]) for t in {*steps, *(t + 1 for t in steps)}}
        for t in steps:
            y_future = y[t : t + FUTURE]
            logits += [*model.decode(memory[t], x[t + 1 : t + FUTURE])][: len(y_future)]
            targets += [*y_future]
            current.append(memory[t])
            if t + 1 == len(x):
                continue
            m, label = memory[t], memory[t + 1]
            if t + 1 not in steps:
                after.append(label)
            if not joint:
                m, label = m.detach(), label.detach()
            predicted.append(model.step(m, x[t + 1]))
            labels.append(label if model.details.moving_label else label.detach())
    compared = current if model.details.m_t_alone else current + after
    return {
        "decode": cross_entropy(logits, targets),
        "dynamics": squared_error(predicted, labels),
        "uniformity": uniformity(compared, model.details),
    }


def dmt_parts(model: Reference, batch: Batch, *, taught: bool, through_time: bool) -> Weights:
    """MSE of the rolled-out and the encoded memory, and the readout's next-token loss."""
    logits, targets, predicted, labels = [], [], [], []
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        first = 1 if taught else 0
        memory = model.encode(x[:1]).detach() if taught else model.empty_memory()
        for t in range(first, len(x)):
            cut = model.details.one_step and not through_time
            memory = model.step(memory.detach() if cut else memory, x[t])
            predicted.append(memory)
            labels.append(model.encode(x[: t + 1]).detach())
            read = memory.detach() if model.details.task_loss_of_readout else memory
            logits.append(model.read_out(read))
            targets.append(y[t])
    return {
        "dynamics": squared_error(predicted, labels),
        "readout": cross_entropy(logits, targets),
    }


def bptt_parts(model: Reference, batch: Batch) -> Weights:
    """The next-token loss of the RNN unrolled from the memory of zeros."""
    logits = []
    for x in batch.inputs:
        memory = model.empty_memory()
        for token in x:
            memory = model.step(memory, token)
            logits.append(model.read_out(memory))
    return {"readout": cross_entropy(logits, [*batch.targets.flatten()])}


# ---------------------------------------------------------------------------------- memtrain's


class Models:
    """memtrain's models with the authors' settings, and the reference on the same weights."""

    def __init__(self, kind: str = "transformer", *, causal_readout: bool = True) -> None:
        torch.manual_seed(0)
        size: dict[str, Any] = dict(
            heads=HEADS, head_dim=HEAD_DIM, rotary_fraction=0.5, width=WIDTH
        )
        config = TeacherConfig(
            context_length=CONTEXT,
            encoder_layers=2,
            decoder_layers=2,
            head_bias=True,
            normalize_memory=kind != "gru",
            **size,
        )
        memory: dict[str, Any] = dict(memory_tokens=TOKENS, memory_dim=WIDTH)
        self.kind = kind
        self.teacher = Teacher(config, VOCAB, TOKENS, WIDTH)
        cell = build_cell(CellConfig(kind=kind, layers=2, **memory, **size), VOCAB)
        self.rnn = RNN(cell, Decoder(config, VOCAB, WIDTH, causal=causal_readout))
        self.named = dict(
            nn.ModuleDict({"teacher": self.teacher, "rnn": self.rnn}).named_parameters()
        )
        with torch.no_grad():
            for name, parameter in self.named.items():
                if "norm" in name or "bias" in name:  # ones and zeros would hide mistakes
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if "project_in" in name:  # scores so large that positions matter
                    parameter.mul_(3)

    def reference(self, details: Details) -> Reference:
        teacher, cell, readout = (
            dict(module.named_parameters())
            for module in (self.teacher, self.rnn.cell, self.rnn.readout)
        )
        return Reference(teacher, cell, readout, self.kind, details)


def batch_of(length: int) -> Batch:
    """Random tokens; some positions carry no target."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCAB, (2, ROWS, length), generator=generator)
    absent = torch.rand(ROWS, length, generator=generator) < 0.3
    return Batch(inputs, targets.where(~absent, IGNORE_INDEX))


def smt(models: Models, *, joint: bool, stream: bool) -> tuple[SMT, Batch]:
    """All timesteps of a sequence, or one of each window of a stream."""
    config = SMTConfig(
        timesteps=int(stream),
        future_length=FUTURE,
        joint=joint,
        decode_weight=DECODE,
        dynamics_weight=DYNAMICS,
        uniformity_weight=UNIFORMITY,
        learn_start=False,
        short_contexts=0.0,
    )
    objective = SMT(models.teacher, models.rnn, config, stream=stream)
    return objective, batch_of(objective.tokens_needed() if stream else LENGTH)


def dmt(models: Models, *, taught: bool, through_time: bool) -> tuple[DMT, Batch]:
    """A rollout from the empty memory, or from the teacher's after the first token."""
    config = DMTConfig(
        rollout_length=LENGTH - taught,
        empty_start=float(not taught),
        through_time=through_time,
        dynamics_weight=DYNAMICS,
    )
    return DMT(models.teacher, models.rnn, config), batch_of(LENGTH)


Case = Callable[[Models, Details], tuple[Losses, Weights, dict[str, float]]]
"""memtrain's losses, the reference's parts, and their weights."""
SMT_WEIGHTS = {"decode": DECODE, "dynamics": DYNAMICS, "uniformity": UNIFORMITY}


def smt_case(*, joint: bool, stream: bool) -> Case:
    def case(models: Models, details: Details):
        objective, batch = smt(models, joint=joint, stream=stream)
        steps = [CONTEXT - 1] if stream else [*range(LENGTH)]
        parts = smt_parts(models.reference(details), batch, steps, joint=joint)
        return objective(batch, torch.Generator().manual_seed(0)), parts, SMT_WEIGHTS

    return case


def dmt_case(**options: bool) -> Case:
    def case(models: Models, details: Details):
        objective, batch = dmt(models, **options)
        parts = dmt_parts(models.reference(details), batch, **options)
        weights = {"dynamics": DYNAMICS, "readout": 1.0}
        return objective(batch, torch.Generator().manual_seed(0)), parts, weights

    return case


def bptt_case(models: Models, details: Details) -> tuple[Losses, Weights, dict[str, float]]:
    batch = batch_of(LENGTH)
    losses = BPTT(models.rnn, BPTTConfig())(batch, torch.Generator())
    return losses, bptt_parts(models.reference(details), batch), {"readout": 1.0}


CASES: dict[str, Case] = {
    "SMT joint": smt_case(joint=True, stream=False),
    "SMT detached": smt_case(joint=False, stream=False),
    "SMT joint, stream": smt_case(joint=True, stream=True),
    "SMT detached, stream": smt_case(joint=False, stream=True),
    "DMT": dmt_case(taught=False, through_time=False),
    "DMT from the teacher": dmt_case(taught=True, through_time=False),
    "DMT through time": dmt_case(taught=False, through_time=True),
    "BPTT": bptt_case,
}


def distance(found: Tensor, expected: Tensor) -> float:
    """The relative error of a tensor."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def differences(case: str, models: Models, details: Details = Details()) -> dict[str, float]:  # noqa: B008
    """The relative error of every loss and of every parameter's gradient."""
    losses, parts, weights = CASES[case](models, details)
    total = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
    found = {name: distance(losses.parts[name], part.detach()) for name, part in parts.items()}
    found["total"] = distance(losses.total.detach(), total.detach())
    wanted = list(models.named.values())
    options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(losses.total, wanted, **options)
    theirs = torch.autograd.grad(total, wanted, **options)
    for name, one, other in zip(models.named, ours, theirs, strict=True):
        found[f"gradient of {name}"] = distance(one, other) if one.any() or other.any() else 0.0
    return found


@pytest.fixture
def precision(request: pytest.FixtureRequest):
    """Models and memories in this precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


PRECISIONS = pytest.mark.parametrize("precision", CLOSE, indirect=True, ids=["fp32", "fp64"])
CELLS = pytest.mark.parametrize("kind", ["transformer", "mlp", "gru"])


@PRECISIONS
@CELLS
def test_outputs_of_the_models(kind: str, precision: torch.dtype):
    models, tokens = Models(kind), batch_of(LENGTH).inputs
    model = models.reference(Details())
    with torch.no_grad():
        memories = models.teacher.encode(tokens)
        logits = models.teacher.decode(memories[:, 1], tokens[:, 2:4])
        after = models.rnn.cell(memories[:, 1], tokens[:, 2])
        read = models.rnn.predict(memories[:, 1])
        for row, x in enumerate(tokens):
            for t in range(LENGTH):
                assert distance(memories[row, t], model.encode(x[: t + 1])) < CLOSE[precision]
            memory = memories[row, 1]
            assert distance(logits[row], model.decode(memory, x[2:4])) < CLOSE[precision]
            assert distance(after[row], model.step(memory, x[2])) < CLOSE[precision]
            assert distance(read[row], model.read_out(memory)) < CLOSE[precision]


@PRECISIONS
@CELLS
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case: str, kind: str, precision: torch.dtype):
    found = differences(case, Models(kind))
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < CLOSE[precision], worst


@PRECISIONS
def test_the_bidirectional_readout_of_the_papers_text(precision: torch.dtype):
    models = Models(causal_readout=False)
    found = differences("BPTT", models, Details(causal_readout=False))
    assert max(found.values()) < CLOSE[precision]
    assert max(differences("BPTT", models).values()) > 100 * CLOSE[precision]


CHANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whole heads rotated": (
        "SMT joint",
        "transformer",
        {"rotated": HEAD_DIM, "frequencies_over": HEAD_DIM},
    ),
    "a quarter rotated": ("SMT joint", "transformer", {"rotated": 2, "frequencies_over": 2}),
    "frequencies of whole heads": ("SMT joint", "transformer", {"frequencies_over": HEAD_DIM}),
    "pairs of halves": ("SMT joint", "transformer", {"neighbours": False}),
    "no bias": ("BPTT", "transformer", {"head_bias": False}),
    "GELU by tanh": ("BPTT", "mlp", {"exact_gelu": False}),
    "memory not normed": ("BPTT", "transformer", {"normed_memory": False}),
    "decoder sees the future": ("SMT joint", "transformer", {"causal_decoder": False}),
    "read at the first memory token": ("BPTT", "transformer", {"last_memory_token": False}),
    "tokens of any length": ("SMT joint", "transformer", {"unit_tokens": False}),
    "m_{t+1} in the uniformity loss": ("SMT joint, stream", "transformer", {"m_t_alone": False}),
    "tokens paired with themselves": ("SMT joint", "transformer", {"other_pairs": False}),
    "labels stopped": ("SMT joint", "transformer", {"moving_label": False}),
    "DMT through time": ("DMT", "transformer", {"one_step": False}),
    "DMT's task loss trains the cell": ("DMT", "transformer", {"task_loss_of_readout": False}),
    "every GRU layer reads the token": ("BPTT", "gru", {"stacked_gru": False}),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("precision", [torch.float64], indirect=True, ids=["fp64"])
def test_a_changed_detail_shows(name: str, precision: torch.dtype):
    case, kind, change = CHANGED[name]
    changed = differences(case, Models(kind), replace(Details(), **change))
    assert max(changed.values()) > 100 * CLOSE[precision]


def test_every_detail_is_changed_once():
    changed = {field for *_, change in CHANGED.values() for field in change}
    assert changed | {"causal_readout"} == set(Details.__dataclass_fields__)


@pytest.mark.parametrize("precision", [torch.float64], indirect=True, ids=["fp64"])
def test_the_epsilon_of_the_norms_hardly_matters(precision: torch.dtype, monkeypatch):
    """The authors' blocks have none; where a memory is empty, one is needed."""
    monkeypatch.setitem(globals(), "EPSILON", 0.0)
    worst = max(differences("SMT joint", Models()).values())
    assert 1e-8 < worst < 1e-4
