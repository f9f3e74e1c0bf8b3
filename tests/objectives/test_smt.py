from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from conftest import (
    ENCODERS,
    VOCAB,
    gradients,
    random_batch,
    random_tokens,
    receives_gradient,
    recorded,
    seeded,
    tiny_cell,
    tiny_rnn,
    tiny_teacher,
)
from memtrain.accel.engine import Engine
from memtrain.config import BPTTConfig, EngineConfig, SMTConfig, Stack, StageConfig
from memtrain.data.task import build_task
from memtrain.errors import MemtrainError
from memtrain.evaluation.cost import CountedCell, recurrent_depth, sequential_ops
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.objectives.base import BatchShard, sample_steps
from memtrain.objectives.bptt import BPTT
from memtrain.objectives.segments import Segments
from memtrain.objectives.smt import SMT, Pretrain
from memtrain.shapes import IGNORE_INDEX, Batch
from memtrain.training.step import Trainer

BOTH = pytest.mark.parametrize("encoder", ENCODERS)
TIMESTEPS = pytest.mark.parametrize("timesteps", [0, 1, 3])
CPU = torch.device("cpu")


def tiny_smt(
    encoder: str = "causal",
    cell: Any = None,
    *,
    context_length: int = 8,
    stream: bool = False,
    **options: Any,
) -> SMT:
    teacher = tiny_teacher(encoder, context_length=context_length)
    config = SMTConfig(**{"future_length": 3, **options})
    return SMT(teacher, tiny_rnn(cell), config, stream=stream)


# ------------------------------------------------------------- the equations, one step at a time


def naive_memory(teacher: Teacher, batch: Batch, row: int, t: int) -> Tensor:
    """E(x_0..x_t), from a run on that prefix alone; zeros where nothing was read."""
    if t < 0:
        return torch.zeros_like(teacher.encode(batch.inputs[:1, :1])[0, 0])
    return teacher.encode(batch.inputs[row : row + 1, : t + 1])[0, -1]


def naive_decode(teacher: Teacher, batch: Batch, steps: list[list[int]], future: int) -> Tensor:
    """The mean cross-entropy of every target that every chosen memory has to predict."""
    losses = []
    for row, chosen in enumerate(steps):
        inputs, targets = batch.inputs[row], batch.targets[row]
        for t in chosen:
            memory = naive_memory(teacher, batch, row, t)[None]
            for due in range(max(0, t), min(t + future, len(targets))):
                if targets[due] != IGNORE_INDEX:
                    logits = teacher.decode(memory, inputs[t + 1 : due + 1][None])[:, -1]
                    losses.append(F.cross_entropy(logits, targets[due : due + 1]))
    return torch.stack(losses).mean()


def naive_dynamics(
    teacher: Teacher, rnn: RNN, batch: Batch, pairs: list[tuple[int, int]], *, joint: bool
) -> Tensor:
    """The mean squared error of the cell's step to each (row, t), from E's memory before it."""
    losses = []
    for row, t in pairs:
        before = rnn.empty_memory(1)[0] if t == 0 else naive_memory(teacher, batch, row, t - 1)
        after = naive_memory(teacher, batch, row, t)
        if not joint:
            before, after = before.detach(), after.detach()
        predicted = rnn.cell(before[None], batch.inputs[row, t : t + 1])[0]
        losses.append((predicted - after).square().mean())
    return torch.stack(losses).mean()


def naive_uniformity(tokens: Tensor) -> Tensor:
    unit = [token / token.norm() for token in tokens]
    potentials = [
        (-2 * (unit[i] - unit[j]).square().sum()).exp() for i in range(len(unit)) for j in range(i)
    ]
    return torch.stack(potentials).mean().log()


def assert_same_loss_and_gradients(objective: SMT, found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    modules = (objective.teacher, objective.rnn)
    parameters = [p for module in modules for p in module.parameters()]
    for one, other in zip(
        gradients(found, parameters), gradients(expected, parameters), strict=True
    ):
        assert_close(one, other, atol=1e-5, rtol=1e-3)


class TestEquations:
    @BOTH
    @pytest.mark.parametrize("joint", [True, False], ids=["joint", "detached"])
    @pytest.mark.parametrize("learn_start", [True, False], ids=["start", "no-start"])
    @pytest.mark.parametrize(
        ("length", "context", "future"), [(6, 8, 3), (5, 3, 9)], ids=["T6-C8-F3", "T5-C3-F9"]
    )
    def test_all_timesteps_equal_a_loop_over_them(
        self, encoder, joint, learn_start, length, context, future
    ):
        weights: dict[str, Any] = dict(
            decode_weight=1.0, dynamics_weight=2.0, uniformity_weight=0.5
        )
        objective = tiny_smt(
            encoder,
            context_length=context,
            timesteps=0,
            future_length=future,
            joint=joint,
            learn_start=learn_start,
            **weights,
        )
        teacher, rnn, batch = objective.teacher, objective.rnn, random_batch(2, length)
        losses = objective(batch, seeded())

        steps = [list(range(length))] * 2
        pairs = [(row, t) for row in range(2) for t in range(0 if learn_start else 1, length)]
        decode = naive_decode(teacher, batch, steps, future)
        dynamics = naive_dynamics(teacher, rnn, batch, pairs, joint=joint)
        memories = [naive_memory(teacher, batch, row, t) for row in range(2) for t in range(length)]
        uniformity = naive_uniformity(torch.cat(memories))
        parts = {"decode": decode, "dynamics": dynamics, "uniformity": uniformity}
        assert losses.parts.keys() == parts.keys()
        for name, shard in parts.items():
            assert_close(losses.parts[name], shard.detach(), atol=1e-5, rtol=1e-5)
        expected = decode + 2 * dynamics + 0.5 * uniformity
        assert_same_loss_and_gradients(objective, losses.total, expected)

    @BOTH
    @pytest.mark.parametrize("learn_start", [True, False], ids=["start", "no-start"])
    def test_a_run_of_timesteps_equals_its_pairs_one_by_one(self, encoder, learn_start):
        """Runs on the ring of states; the pair from the last state to the first does not count."""
        objective = tiny_smt(encoder, timesteps=2, learn_start=learn_start, dynamics_weight=2.0)
        teacher, rnn, batch = objective.teacher, objective.rnn, random_batch(4, 5, target_rate=1.0)
        states = list(range(-1 if learn_start else 0, 5))
        begin = sample_steps(4, 1, len(states), seeded(38), CPU).flatten().tolist()
        runs = [[states[(b + i) % len(states)] for i in range(3)] for b in begin]
        assert any(run[1] < run[0] for run in runs), "one run wraps after its first state"
        losses = objective(batch, seeded(38))

        pairs = [
            (row, after)
            for row, run in enumerate(runs)
            for before, after in zip(run, run[1:], strict=False)
            if after == before + 1
        ]
        memories = [
            naive_memory(teacher, batch, row, t)
            for row, run in enumerate(runs)
            for t in run[:-1]  # the last one is a label only
            if t >= 0
        ]
        parts = {
            "decode": naive_decode(teacher, batch, [run[:2] for run in runs], 3),
            "dynamics": naive_dynamics(teacher, rnn, batch, pairs, joint=True),
            "uniformity": naive_uniformity(torch.cat(memories)),
        }
        for name, shard in parts.items():
            assert_close(losses.parts[name], shard.detach(), atol=1e-5, rtol=1e-5)
        expected = parts["decode"] + 2 * parts["dynamics"] + 0.001 * parts["uniformity"]
        assert_same_loss_and_gradients(objective, losses.total, expected)

    @pytest.mark.parametrize(("timesteps", "context_length"), [(2, 8), (1, 2)])
    def test_every_state_is_decoded_and_stepped_from_equally_often(self, timesteps, context_length):
        objective = tiny_smt(timesteps=timesteps, context_length=context_length)
        counts = torch.zeros(6)
        batch = random_batch(64, 5)
        for seed in range(40):
            steps, _, decoded = objective._states(batch, seeded(seed))
            counts += (steps.gather(1, decoded) + 1).flatten().bincount(minlength=6)
        share = counts / counts.sum()
        assert bool(((share - 1 / 6).abs() < 0.02).all())

    def test_windows_of_a_stream_have_whole_contexts_short_ones_and_none(self):
        objective = tiny_smt(timesteps=1, context_length=4, stream=True)
        steps, _, decoded = objective._states(random_batch(64, 9), seeded())
        first = steps[:, 0]
        assert torch.equal(steps[:, 1], first + 1)
        assert first[:2].tolist() == [-1, -1] and decoded[:2].flatten().tolist() == [1, 1]
        assert set(first[2:16].tolist()) == {0, 1, 2, 3}
        assert set(first[16:].tolist()) == {3} and not decoded[2:].any()

    def test_the_only_window_of_a_batch_begins_empty_in_one_of_32(self):
        objective, generator = tiny_smt(timesteps=1, context_length=4, stream=True), seeded()
        found = []
        for _ in range(600):
            steps, _, decoded = objective._states(random_batch(1, 9), generator)
            found += steps[:, 0].tolist()
            assert decoded.item() == (found[-1] < 0)  # the empty memory is not decoded
        assert set(found) == {-1, 3} and 8 < found.count(-1) < 32

    @BOTH
    def test_decode_timesteps_is_the_number_of_distinct_decoded_steps(self, encoder):
        objective = tiny_smt(encoder, timesteps=0, decode_timesteps=2)
        batch = random_batch(3, 6, target_rate=1.0)
        losses = objective(batch, seeded(7))
        steps = sample_steps(3, 2, 6, seeded(7), CPU).tolist()
        decode = naive_decode(objective.teacher, batch, steps, 3)
        assert_close(losses.parts["decode"], decode.detach(), atol=1e-5, rtol=1e-5)
        everywhere = tiny_smt(encoder, timesteps=0)(batch, seeded(7))
        assert_close(losses.parts["dynamics"], everywhere.parts["dynamics"])
        assert_close(losses.parts["uniformity"], everywhere.parts["uniformity"])

    def test_uniformity_of_a_stream_compares_one_memory_of_each_window(self):
        """m_{t+1} is there as the label of the cell's step only, and m_t is not empty."""
        objective = tiny_smt("bidirectional", timesteps=1, context_length=4, stream=True)
        batch = random_batch(64, 9)
        losses = objective(batch, seeded())
        steps, current, decoded = objective._states(batch, seeded())
        assert torch.equal(current, decoded) and current.shape == (64, 1)
        at = steps.gather(1, current)
        assert int(at.min()) == 0  # after the first token, where the window begins empty
        found = naive_uniformity(objective.teacher.encode(batch.inputs, at).flatten(0, 2))
        assert_close(losses.parts["uniformity"], found.detach(), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(("count", "rows"), [(0, 12), (4, 8), (6, 12), (9, 12)])
    def test_decode_timesteps_beyond_the_sequence_decodes_every_step(self, count, rows):
        objective, calls = tiny_smt(timesteps=0, decode_timesteps=count), []
        objective.teacher.decode = recorded(calls, objective.teacher.decode)
        objective(random_batch(2, 6), seeded())
        assert [len(memory) for memory, *_ in calls] == [rows]

    @pytest.mark.parametrize("joint", [True, False], ids=["joint", "detached"])
    @TIMESTEPS
    def test_the_total_weights_its_parts(self, timesteps, joint):
        batch = random_batch(3, 6)
        weights = (0.3, 7.0, 0.02, 0.5, 0.4, 0.6)
        names = ("decode", "dynamics", "uniformity", "next", "token", "cell_decode")
        options: dict[str, Any] = {
            f"{name}_weight": w for name, w in zip(names, weights, strict=True)
        }
        losses = tiny_smt(timesteps=timesteps, joint=joint, **options)(batch, seeded())
        every: dict[str, Any] = {name: 1.0 for name in options}
        plain = tiny_smt(timesteps=timesteps, joint=joint, **every)(batch, seeded())
        assert not any(shard.requires_grad for shard in losses.parts.values())
        for name in names:
            assert_close(losses.parts[name], plain.parts[name])
        total = sum(w * float(losses.parts[name]) for name, w in zip(names, weights, strict=True))
        total += weights[3] * weights[5] * float(losses.parts["cell_next"])
        assert losses.total.item() == pytest.approx(total, rel=1e-5)

    def test_every_target_is_predicted_at_its_token(self):
        batch = random_batch(3, 6)
        objective = tiny_smt(token_weight=1.0)
        losses = objective(batch, seeded())
        _, logits = objective.teacher.encode_with_logits(batch.inputs, batch.inputs[:, :1] * 0)
        there = batch.targets != IGNORE_INDEX
        expected = -logits.log_softmax(-1)[there].gather(1, batch.targets[there][:, None]).mean()
        assert_close(losses.parts["token"], expected)
        assert not objective.applies_once  # of the decoder's head

    @TIMESTEPS
    def test_uniformity_samples_bounds_the_tokens_compared(self, timesteps):
        batch = random_batch(4, 6)
        few = tiny_smt(timesteps=timesteps, uniformity_samples=3)(batch, seeded())
        all_of_them = tiny_smt(timesteps=timesteps)(batch, seeded())
        assert few.parts["uniformity"] != all_of_them.parts["uniformity"]

    @TIMESTEPS
    def test_the_generator_is_the_only_source_of_randomness(self, timesteps):
        batch = random_batch(4, 8)
        objective = tiny_smt(timesteps=timesteps, decode_timesteps=3)
        losses = []
        for seed in (0, 0, 1):
            torch.manual_seed(len(losses))
            losses.append(objective(batch, seeded(seed)).total.item())
        assert losses[0] == losses[1] != losses[2]


class TestShortSequences:
    @BOTH
    @TIMESTEPS
    @pytest.mark.parametrize("length", [1, 2], ids=["T1", "T2"])
    def test_train_too(self, encoder, timesteps, length):
        objective = tiny_smt(encoder, timesteps=timesteps)
        losses = objective(random_batch(3, length), seeded())
        assert all(shard.isfinite() for shard in losses.parts.values())
        for module in objective.trained().values():
            assert receives_gradient(losses.total, module)
            assert all(g.isfinite().all() for g in gradients(losses.total, module.parameters()))

    @BOTH
    @TIMESTEPS
    def test_without_any_target_only_the_decoding_loss_vanishes(self, encoder, timesteps):
        inputs = random_tokens(3, 5)
        batch = Batch(inputs, torch.full_like(inputs, IGNORE_INDEX))
        objective = tiny_smt(encoder, timesteps=timesteps)
        losses = objective(batch, seeded())
        assert losses.parts["decode"] == 0
        assert losses.parts["dynamics"] > 0
        assert receives_gradient(losses.total, objective.rnn.cell)


class TestGradients:
    @BOTH
    @TIMESTEPS
    @pytest.mark.parametrize("joint", [True, False], ids=["joint", "detached"])
    @pytest.mark.parametrize("length", [4, 8, 16], ids=lambda n: f"T{n}")
    def test_credit_passes_one_application_of_the_cell_however_long_the_sequence(
        self, encoder, timesteps, joint, length
    ):
        objective = tiny_smt(encoder, CountedCell(tiny_cell()), timesteps=timesteps, joint=joint)
        batch = random_batch(2, length)
        assert recurrent_depth(objective(batch, seeded()).total) == 1

    @pytest.mark.parametrize("length", [4, 8, 16], ids=lambda n: f"T{n}")
    def test_credit_of_bptt_passes_as_many_as_there_are_tokens(self, length):
        objective = BPTT(tiny_rnn(CountedCell(tiny_cell())), BPTTConfig())
        assert recurrent_depth(objective(random_batch(2, length), seeded()).total) == length

    @TIMESTEPS
    def test_joint_dynamics_shape_the_memories_before_and_after_the_step(self, timesteps):
        objective = tiny_smt(
            timesteps=timesteps,
            decode_weight=0.0,
            uniformity_weight=0.0,
            dynamics_weight=1.0,
            learn_start=False,
        )
        batch = random_batch(3, 2)  # two steps: the pair (0, 1) in both modes
        memory = objective.teacher.encode(batch.inputs).detach().requires_grad_()
        objective.teacher.encode = lambda inputs, steps=None: memory
        objective(batch, seeded()).total.backward()

        predicted = objective.rnn.cell(memory[:, 0], batch.inputs[:, 1])
        error = predicted - memory[:, 1]
        assert memory.grad is not None
        # At m_{t+1} the plain error; at m_t the error drawn back through the cell.
        assert_close(memory.grad[:, 1], -2 * error.detach() / error.numel())
        (back,) = torch.autograd.grad(predicted, memory, 2 * error.detach() / error.numel())
        assert back[:, 0].abs().max() > 1e-6
        assert_close(memory.grad[:, 0], back[:, 0])

    @BOTH
    @TIMESTEPS
    @pytest.mark.parametrize("joint", [True, False], ids=["joint", "detached"])
    def test_dynamics_reach_the_encoder_only_when_joint(self, encoder, timesteps, joint):
        objective = tiny_smt(
            encoder, timesteps=timesteps, joint=joint, decode_weight=0.0, uniformity_weight=0.0
        )
        total = objective(random_batch(3, 5), seeded()).total
        assert receives_gradient(total, objective.rnn.cell)
        assert receives_gradient(total, objective.teacher.encoder) is joint
        assert receives_gradient(total, objective.teacher.embedding) is joint
        assert not receives_gradient(total, objective.teacher.decoder)

    @BOTH
    @TIMESTEPS
    def test_decoding_trains_the_teacher_and_never_the_cell(self, encoder, timesteps):
        objective = tiny_smt(
            encoder, timesteps=timesteps, dynamics_weight=0.0, uniformity_weight=0.0
        )
        total = objective(random_batch(3, 5), seeded()).total
        assert receives_gradient(total, objective.teacher.encoder)
        assert receives_gradient(total, objective.teacher.decoder)
        assert not receives_gradient(total, objective.rnn.cell)

    @BOTH
    @TIMESTEPS
    def test_uniformity_trains_the_encoder_alone(self, encoder, timesteps):
        objective = tiny_smt(
            encoder,
            timesteps=timesteps,
            dynamics_weight=0.0,
            decode_weight=0.0,
            uniformity_weight=1.0,
        )
        total = objective(random_batch(3, 5), seeded()).total
        assert receives_gradient(total, objective.teacher.encoder)
        assert not receives_gradient(total, objective.teacher.decoder)
        assert not receives_gradient(total, objective.rnn.cell)

    @BOTH
    @TIMESTEPS
    def test_every_trained_parameter_gets_a_gradient_and_the_readout_none(self, encoder, timesteps):
        objective = tiny_smt(encoder, timesteps=timesteps)
        total = objective(random_batch(4, 6, target_rate=1.0), seeded()).total
        trained = objective.trained()
        assert trained == {"teacher": objective.teacher, "cell": objective.rnn.cell}
        for name, module in trained.items():
            for key, parameter in module.named_parameters():
                (gradient,) = gradients(total, [parameter])
                assert gradient.any(), f"{name}.{key}"
        assert not receives_gradient(total, objective.rnn.readout)


class TestTwoStages:
    """The teacher alone, then the cell from the labels of the frozen teacher."""

    @BOTH
    @TIMESTEPS
    @pytest.mark.parametrize("stream", [False, True], ids=["task", "stream"])
    def test_pretraining_has_the_losses_of_smt_without_dynamics(self, encoder, timesteps, stream):
        options: dict[str, Any] = dict(timesteps=timesteps, context_length=4, stream=stream)
        weights: dict[str, Any] = dict(uniformity_weight=0.5, next_weight=0.3, decode_timesteps=1)
        smt = tiny_smt(encoder, **options, **weights, dynamics_weight=0.0)
        pretrain = Pretrain(smt.teacher, smt.rnn, smt.config, stream=stream)
        batch = random_batch(8, 9, target_rate=1.0)
        expected, losses = smt(batch, seeded(3)), pretrain(batch, seeded(3))
        assert losses.parts.keys() == {"decode", "uniformity", "next"}
        for name, part in losses.parts.items():
            assert_close(part, expected.parts[name], atol=1e-5, rtol=1e-5)
        assert_same_loss_and_gradients(smt, losses.total, expected.total)
        assert not receives_gradient(losses.total, smt.rnn)

    def test_pretraining_encodes_no_memory_that_is_a_label_only(self):
        smt, calls = tiny_smt("bidirectional", timesteps=1, context_length=4, stream=True), []
        pretrain = Pretrain(smt.teacher, smt.rnn, smt.config, stream=True)
        smt.teacher.encode = recorded(calls, smt.teacher.encode)
        pretrain(random_batch(8, 9), seeded())
        smt(random_batch(8, 9), seeded())
        assert [steps.shape for _, steps, _ in calls] == [(8, 1), (8, 2)]

    def test_pretraining_trains_the_teacher_alone_also_if_smt_does_not(self):
        objective = Pretrain(tiny_teacher(), tiny_rnn(), SMTConfig(train_teacher=False))
        assert objective.trained() == {"teacher": objective.teacher}
        total = objective(random_batch(4, 6, target_rate=1.0), seeded()).total
        for name, parameter in objective.teacher.named_parameters():
            (gradient,) = gradients(total, [parameter])
            assert gradient.any(), name

    @BOTH
    @TIMESTEPS
    @pytest.mark.parametrize("noise", [0.0, 0.3])
    def test_a_frozen_teacher_gets_no_gradient_and_is_not_decoded(self, encoder, timesteps, noise):
        options: dict[str, Any] = dict(timesteps=timesteps, memory_noise=noise)
        objective, calls = tiny_smt(encoder, **options, train_teacher=False), []
        objective.teacher.decode = recorded(calls, objective.teacher.decode)
        batch = random_batch(4, 6)
        losses = objective(batch, seeded())
        assert objective.trained() == {"cell": objective.rnn.cell} and not calls
        assert losses.parts.keys() == {"dynamics"}
        losses.total.backward()
        assert all(p.grad is None for p in objective.teacher.parameters())
        assert all(p.grad is None for p in objective.rnn.readout.parameters())
        detached = tiny_smt(encoder, **options, joint=False)
        expected = detached(batch, seeded())
        assert torch.equal(losses.parts["dynamics"], expected.parts["dynamics"])
        expected.total.backward()  # the same loss trains the cell of detached SMT
        for one, other in zip(
            objective.rnn.cell.parameters(), detached.rnn.cell.parameters(), strict=True
        ):
            assert one.grad is not None and other.grad is not None
            assert torch.equal(one.grad, other.grad)

    def test_the_readout_is_copied_from_the_frozen_teacher(self):
        objective = tiny_smt(train_teacher=False)
        memory = torch.randn(3, 2, 16)
        objective.sync_readout()
        assert torch.equal(objective.rnn.predict(memory), objective.teacher.predict(memory))

    @pytest.mark.parametrize("frozen", [False, True])
    def test_only_the_trained_model_changes(self, frozen):
        task = build_task(Stack(sequence_length=8, vocab_size=VOCAB, depth=3))
        objective = tiny_smt(timesteps=0, train_teacher=not frozen)
        if not frozen:
            objective = Pretrain(objective.teacher, objective.rnn, objective.config)
        stage = StageConfig(steps=3, batch_size=4, learning_rate=1e-2)
        trainer = Trainer(objective, stage, task, Engine(EngineConfig(device="cpu")), seed=0)
        before = {name: value.clone() for name, value in objective.state_dict().items()}
        with trainer.frozen_rest():
            metrics = [trainer.train_step() for _ in range(3)][-1]
        norms = {name for name in metrics if name.startswith("gradient_norm")}
        assert norms == {"gradient_norm_cell" if frozen else "gradient_norm_teacher"}
        changed = {
            name.split(".")[1 if name.startswith("rnn") else 0]
            for name, value in objective.state_dict().items()
            if not torch.equal(value, before[name])
        }
        assert changed == {"cell" if frozen else "teacher"}


@BOTH
@TIMESTEPS
def test_sequential_operations_do_not_grow_with_the_sequence(encoder, timesteps):
    objective = tiny_smt(encoder, timesteps=timesteps, context_length=16)
    counts = []
    for length in (4, 8, 16):
        batch, generator = random_batch(2, length), seeded()
        counts.append(sequential_ops(lambda b=batch, g=generator: objective(b, g).total))
    assert counts[0] == counts[1] == counts[2] > 0


def test_settling_makes_the_readout_predict_like_the_decoder():
    objective = tiny_smt()
    memory = objective.teacher.encode(random_tokens(3, 5))[:, -1].detach()
    expected = objective.teacher.predict(memory)
    assert not torch.allclose(objective.rnn.predict(memory), expected)
    objective.sync_readout()
    assert torch.equal(objective.rnn.predict(memory), expected)
    # A copy: training the decoder further leaves the readout as it is.
    with torch.no_grad():
        objective.teacher.decoder.head.weight.zero_()
    assert torch.equal(objective.rnn.predict(memory), expected)


class TestDrawSteps:
    def test_steps_of_a_row_are_distinct_and_below_the_limit(self):
        steps = sample_steps(50, 4, 6, seeded(), CPU)
        assert steps.shape == (50, 4)
        assert all(len(set(row)) == 4 for row in steps.tolist())
        assert set(steps.flatten().tolist()) == set(range(6))

    def test_steps_are_uniformly_sampled(self):
        steps = sample_steps(6000, 1, 6, seeded(), CPU)
        counts = steps.flatten().bincount(minlength=6)
        assert ((counts - 1000).abs() < 150).all()  # 5 standard deviations


def test_sequences_of_one_token_have_finite_losses():
    for learn_start in (True, False):
        objective = tiny_smt(timesteps=1, learn_start=learn_start)
        losses = objective(random_batch(1, 1, target_rate=1.0), seeded())
        assert bool(losses.total.isfinite())


def test_the_step_from_the_empty_memory_counts_by_its_weight():
    """Three pairs, the first counts four times: (4 a + b + c) / 6."""
    batch = random_batch(2, 3, target_rate=1.0)
    without = tiny_smt(timesteps=0, learn_start=False)(batch, seeded()).parts["dynamics"]
    mean = tiny_smt(timesteps=0)(batch, seeded()).parts["dynamics"]
    weighted = tiny_smt(timesteps=0, start_weight=4.0)(batch, seeded()).parts["dynamics"]
    start = 3 * mean - 2 * without
    assert_close(weighted, (4 * start + 2 * without) / 6)


# ------------------------------------------------------------------- options past the paper


def dynamics_of(
    objective: SMT, batch: Batch, memory: Tensor, steps: Tensor, generator: torch.Generator
) -> Tensor:
    """The dynamics loss of given memories after the given steps."""
    segments = Segments(steps, objective.config.dynamics_steps)
    stepped = objective._step(batch, memory, segments, generator)
    return objective._dynamics(stepped, memory, segments)


SEGMENTS = {1: range(6), 2: (0, 2, 4), 3: (0, 3), 4: (0, 2)}
"""The first pairs of segments of 1 to 4 of six pairs; the last one may overlap another."""


LAST_SEGMENTS = SEGMENTS | {6: (0,)}


class TestDynamicsOptions:
    @BOTH
    @pytest.mark.parametrize("steps", [2, 3, 4])
    def test_several_steps_equal_a_loop_over_them(self, encoder, steps):
        objective = tiny_smt(
            encoder, timesteps=0, decode_weight=0.0, uniformity_weight=0.0, dynamics_steps=steps
        )
        teacher, rnn, batch = objective.teacher, objective.rnn, random_batch(2, 6)
        found = objective(batch, seeded())
        losses = []
        for row in range(2):
            for first in SEGMENTS[steps]:
                memory = naive_memory(teacher, batch, row, first - 1)[None]
                for t in range(first, first + steps):
                    memory = rnn.cell(memory, batch.inputs[row, t : t + 1])
                    label = naive_memory(teacher, batch, row, t)
                    losses.append((memory[0] - label).square().mean())
        expected = 0.1 * torch.stack(losses).mean()
        assert_same_loss_and_gradients(objective, found.total, expected)

    def test_a_segment_with_the_end_of_a_sequence_begins_at_the_next_start(self):
        """A run of timesteps on the ring of all states goes from the end to the start."""
        objective = tiny_smt(timesteps=3, dynamics_steps=3, decode_weight=0.0)
        batch = random_batch(64, 5)
        steps, *_ = objective._states(batch, seeded())
        memory = objective.teacher.encode(batch.inputs, steps)
        real = steps[:, 1:] == steps[:, :-1] + 1
        losses = []
        for row, pairs in enumerate(real.tolist()):
            first = 0 if all(pairs) else pairs.index(False) + 1
            predicted = memory[row, first][None]
            for pair in range(first, 3):
                token = batch.inputs[row, steps[row, pair + 1]][None]
                predicted = objective.rnn.cell(predicted, token)
                losses.append((predicted[0] - memory[row, pair + 1]).square().mean())
        starts = real.all(1), ~real[:, 0], ~real[:, 1], ~real[:, 2]
        assert all(found.any() for found in starts)
        loss = dynamics_of(objective, batch, memory, steps, seeded())
        assert_close(loss, torch.stack(losses).mean())

    @BOTH
    @pytest.mark.parametrize(
        ("steps", "frozen"), [(2, False), (3, False), (4, False), (6, False), (4, True)]
    )
    def test_the_last_label_alone_equals_a_loop_over_segments(self, encoder, steps, frozen):
        """The teacher is decoded, and its memories are spread, where segments end."""
        options: dict[str, Any] = dict(dynamics_steps=steps, dynamics_labels="last")
        weights: dict[str, Any] = dict(dynamics_weight=2.0, cell_decode_weight=0.3)
        objective = tiny_smt(encoder, timesteps=0, train_teacher=not frozen, **options, **weights)
        teacher, rnn = objective.teacher, objective.rnn
        teacher.requires_grad_(not frozen)
        batch = random_batch(2, 6, target_rate=1.0)
        found = objective(batch, seeded())
        dynamics, total, count, ends = [], torch.zeros(()), 0, []
        for row, first in product(range(2), LAST_SEGMENTS[steps]):
            memory = naive_memory(teacher, batch, row, first - 1)[None]
            for t in range(first, first + steps):
                memory = rnn.cell(memory, batch.inputs[row, t : t + 1])
                logits = teacher.decode(memory, batch.inputs[row : row + 1, t + 1 : t + 3])[0]
                due = batch.targets[row, t : t + 3]
                total = total + F.cross_entropy(logits[: len(due)], due, reduction="sum")
                count += len(due)
            label = naive_memory(teacher, batch, row, first + steps - 1)
            dynamics.append((memory[0] - label).square().mean())
            ends.append((row, first + steps - 1))
        parts = {"dynamics": torch.stack(dynamics).mean(), "cell_decode": total / count}
        expected = 2 * parts["dynamics"] + 0.3 * parts["cell_decode"]
        if not frozen:
            at = [[t for row, t in ends if row == one] for one in range(2)]
            memories = torch.cat([naive_memory(teacher, batch, *end) for end in ends])
            parts["decode"] = naive_decode(teacher, batch, at, 3)
            parts["uniformity"] = naive_uniformity(memories)
            expected = expected + parts["decode"] + 0.001 * parts["uniformity"]
        assert found.parts.keys() == parts.keys()
        for name, part in parts.items():
            assert_close(found.parts[name], part.detach(), atol=1e-5, rtol=1e-5)
        if frozen:
            assert receives_gradient(found.total, rnn.cell)
        else:
            assert_same_loss_and_gradients(objective, found.total, expected)

    def test_the_last_label_is_that_of_the_segment_that_begins_at_the_next_start(self):
        """Runs of timesteps on the ring of all states, of which some go from end to start."""
        options: dict[str, Any] = dict(timesteps=3, dynamics_steps=3, dynamics_labels="last")
        objective = tiny_smt(**options)
        batch = random_batch(64, 5)
        states = objective._states(batch, seeded())
        segments = Segments(states.steps, 3)
        memory = objective.teacher.encode(batch.inputs, states.steps)
        losses = []
        for row, pairs in enumerate(segments.real.tolist()):
            first = 0 if all(pairs) else pairs.index(False) + 1
            predicted = memory[row, first][None]
            for pair in range(first, 3):
                token = batch.inputs[row, states.steps[row, pair + 1]][None]
                predicted = objective.rnn.cell(predicted, token)
            if first < 3:
                losses.append((predicted[0] - memory[row, 3]).square().mean())
        assert len(losses) < 64, "one run ends where a sequence does"
        encoded = objective._encoded(states, segments).steps
        kept = objective.teacher.encode(batch.inputs, encoded)
        stepped = objective._step(batch, kept, segments, seeded())
        loss = objective._dynamics(stepped, kept, segments)
        assert_close(loss, torch.stack(losses).mean())

    def test_with_the_last_label_alone_the_teacher_encodes_two_states_of_each_segment(self):
        options: dict[str, Any] = dict(timesteps=0, dynamics_steps=4, dynamics_labels="last")
        objective, calls = tiny_smt(**options), []
        pretrain = Pretrain(objective.teacher, objective.rnn, objective.config)
        objective.teacher.encode = recorded(calls, objective.teacher.encode)
        batch = random_batch(3, 12)
        objective(batch, seeded())
        pretrain(batch, seeded())
        assert [steps[0].tolist() for _, steps, _ in calls] == [
            [-1, 3, 7, 3, 7, 11],
            [3, 7, 11],
        ]

    def test_with_segments_of_one_step_the_last_label_is_the_only_one(self):
        batch = random_batch(3, 6)
        every, last = (
            tiny_smt(timesteps=0, dynamics_labels=labels)(batch, seeded())
            for labels in ("all", "last")
        )
        assert torch.equal(every.total, last.total)

    @pytest.mark.parametrize("labels", ["all", "last"])
    @pytest.mark.parametrize(
        ("steps", "sweeps", "firsts"), [(2, 1, (0, 2, 4)), (2, 2, (0, 2, 4)), (4, 1, (0, 2))]
    )
    def test_own_starts_are_where_the_cell_ended_the_segment_before(
        self, steps, sweeps, firsts, labels
    ):
        """From the teacher's memory `sweeps` segments before, without gradients; not where segments
        overlap."""
        options: dict[str, Any] = dict(dynamics_steps=steps, dynamics_labels=labels)
        options |= dict(own_sweeps=sweeps)
        options |= dict(decode_weight=0.0, uniformity_weight=0.0, own_starts=1.0)
        objective = tiny_smt(timesteps=0, **options)
        teacher, rnn, batch = objective.teacher, objective.rnn, random_batch(2, 6)
        found = objective(batch, seeded())
        losses = []
        for row in range(2):
            for place, first in enumerate(firsts):
                follows = place > 0 and first == firsts[place - 1] + steps
                begin = firsts[max(0, place - sweeps)] if follows else first
                memory = naive_memory(teacher, batch, row, begin - 1)[None]
                for t in range(begin, first):
                    memory = rnn.cell(memory, batch.inputs[row, t : t + 1]).detach()
                for t in range(first, first + steps):
                    memory = rnn.cell(memory, batch.inputs[row, t : t + 1])
                    if labels == "all" or t == first + steps - 1:
                        label = naive_memory(teacher, batch, row, t)
                        losses.append((memory[0] - label).square().mean())
        assert_same_loss_and_gradients(objective, found.total, 0.1 * torch.stack(losses).mean())

    def test_own_starts_are_those_of_a_share_of_the_sequences(self):
        objective = tiny_smt(timesteps=0, dynamics_steps=2, own_starts=0.3)
        segments = Segments(torch.arange(-1, 6).expand(400, 7), 2)
        start = torch.zeros(1200, *objective.rnn.empty_memory(1).shape[1:])
        tokens = random_tokens(1200, 2)
        found = objective._own_starts(start, tokens, segments, seeded())
        changed = found.flatten(1).any(1).view(400, 3)
        assert not changed[:, 0].any() and torch.equal(changed[:, 1], changed[:, 2])
        assert 0.2 < float(changed[:, 1].float().mean()) < 0.4

    def test_own_starts_without_segments_are_refused(self):
        with pytest.raises(MemtrainError, match="own_starts=0.5 with dynamics_steps=1: needs segm"):
            SMTConfig(own_starts=0.5)

    def test_sweeps_without_own_starts_are_refused(self):
        with pytest.raises(MemtrainError, match="own_sweeps=2 with own_starts=0: no segment"):
            SMTConfig(own_sweeps=2)

    def test_normalized_dynamics_is_refused_with_the_last_label_alone(self):
        with pytest.raises(MemtrainError, match="normalize_dynamics=True with dynamics_labels=la"):
            SMTConfig(normalize_dynamics=True, dynamics_labels="last")

    @pytest.mark.parametrize("steps", [1, 4])
    def test_stream_windows_are_long_enough_for_the_steps(self, steps):
        objective = tiny_smt(stream=True, dynamics_steps=steps, short_contexts=0.5)
        batch = random_batch(8, objective.tokens_needed())
        chosen, *_ = objective._states(batch, seeded())
        assert chosen.shape == (8, steps + 1) and int(chosen.max()) < batch.inputs.shape[1]
        assert objective(batch, seeded()).total.isfinite()

    @BOTH
    @pytest.mark.parametrize("steps", [1, 2])
    def test_decoding_after_the_cells_steps_equals_a_loop_over_them(self, encoder, steps):
        weights: dict[str, Any] = dict(decode_weight=0.0, uniformity_weight=0.0)
        weights |= dict(dynamics_weight=0.0, cell_decode_weight=0.3, future_length=3)
        objective = tiny_smt(encoder, timesteps=0, dynamics_steps=steps, **weights)
        assert not objective.applies_once  # the decoder is applied twice
        teacher, rnn, batch = objective.teacher, objective.rnn, random_batch(2, 6)
        found = objective(batch, seeded())
        total, count = torch.zeros(()), 0
        for row, first in product(range(2), SEGMENTS[steps]):
            memory = naive_memory(teacher, batch, row, first - 1)[None]
            for t in range(first, first + steps):
                memory = rnn.cell(memory, batch.inputs[row, t : t + 1])
                logits = teacher.decode(memory, batch.inputs[row : row + 1, t + 1 : t + 3])[0]
                due = batch.targets[row, t : t + 3]
                total = total + F.cross_entropy(
                    logits[: len(due)], due, ignore_index=IGNORE_INDEX, reduction="sum"
                )
                count += int((due != IGNORE_INDEX).sum())
        assert_close(found.parts["cell_decode"], (total / count).detach())
        assert_same_loss_and_gradients(objective, found.total, 0.3 * total / count)

    def test_decoding_after_the_cells_steps_takes_as_many_memories_as_of_the_teacher(self):
        objective, calls = tiny_smt(timesteps=0, decode_timesteps=2, cell_decode_weight=1.0), []
        objective.teacher.decode = recorded(calls, objective.teacher.decode)
        objective(random_batch(3, 6), seeded())
        assert [len(memory) for memory, *_ in calls] == [6, 6]

    def test_after_the_end_of_a_sequence_nothing_is_decoded(self):
        """A run of timesteps on the ring of all states goes from the end to the start."""
        objective = tiny_smt(timesteps=3, cell_decode_weight=1.0, decode_weight=0.0)
        batch = random_batch(64, 5, target_rate=1.0)
        steps, *_ = objective._states(batch, seeded())
        memory = objective.teacher.encode(batch.inputs, steps)
        stepped = objective._step(batch, memory, Segments(steps, 1), seeded())
        crossing = steps[:, 1:] != steps[:, :-1] + 1
        after = stepped.after[..., 0]
        assert crossing.any() and (after[crossing] == 5).all()
        assert torch.equal(after[~crossing], steps[:, 1:][~crossing])

    def test_the_next_target_counts_in_the_cells_decoding_as_in_the_teachers(self):
        """With a future of one target both decoding losses of the cell are the same."""
        weights: dict[str, Any] = dict(decode_weight=0.0, uniformity_weight=0.0)
        weights |= dict(dynamics_weight=0.0, cell_decode_weight=0.5, next_weight=0.25)
        objective = tiny_smt(timesteps=0, dynamics_steps=2, future_length=1, **weights)
        losses = objective(random_batch(3, 6, target_rate=1.0), seeded())
        decode, following = losses.parts["cell_decode"], losses.parts["cell_next"]
        assert_close(decode, following)
        total = 0.5 * decode + 0.5 * 0.25 * following + 0.25 * losses.parts["next"]
        assert_close(losses.total.detach(), total)

    def test_with_a_frozen_teacher_it_trains_the_cell(self):
        objective = tiny_smt(train_teacher=False, cell_decode_weight=1.0, dynamics_weight=0.0)
        for parameter in objective.teacher.parameters():
            parameter.requires_grad_(False)  # as the trainer does
        losses = objective(random_batch(3, 6), seeded())
        assert set(losses.parts) == {"dynamics", "cell_decode"}
        assert receives_gradient(losses.total, objective.rnn.cell)

    def test_normalized_dynamics_does_not_reward_smaller_memories(self):
        options: dict[str, Any] = dict(timesteps=0, normalize_dynamics=True)
        objective = tiny_smt(**options)
        batch, states = random_batch(2, 6), torch.arange(-1, 6).expand(2, 7)
        memory = torch.randn(2, 7, 2, 8, generator=seeded())
        unmoved = torch.nn.Module()
        unmoved.unroll_last = lambda token, start: start  # type: ignore[assignment]
        objective.rnn = unmoved  # type: ignore[assignment]
        for scale in (1.0, 0.1):
            loss = dynamics_of(objective, batch, scale * memory, states, seeded())
            assert_close(loss, torch.tensor(1.0))  # an identity cell explains nothing

    def test_normalized_dynamics_is_the_plain_loss_over_a_constant(self):
        plain = tiny_smt(timesteps=0)
        normal = tiny_smt(timesteps=0, normalize_dynamics=True)
        normal.load_state_dict(plain.state_dict())
        batch = random_batch(2, 6)
        memory = plain.teacher.encode(batch.inputs)
        distance = (memory[:, 1:] - memory[:, :-1]).square().mean()
        steps = torch.arange(6).expand(2, 6)
        expected = dynamics_of(plain, batch, memory, steps, seeded()) / distance.detach()
        again = normal.teacher.encode(batch.inputs)
        found = dynamics_of(normal, batch, again, steps, seeded())
        assert_close(found, expected)
        for one, other in zip(
            gradients(found, list(normal.parameters())),
            gradients(expected, list(plain.parameters())),
            strict=True,
        ):
            assert_close(one, other, atol=1e-6, rtol=1e-4)

    def test_noise_is_added_only_to_the_cells_input_memory(self):
        objective = tiny_smt(timesteps=0, memory_noise=0.5)
        seen = []
        objective.rnn.unroll_last = lambda token, start: seen.append(start) or start  # type: ignore
        batch, states = random_batch(512, 6), torch.arange(-1, 6).expand(512, 7)
        memory = torch.zeros(512, 7, 2, 8)
        before = memory.clone()
        dynamics_of(objective, batch, memory, states, seeded())
        deviation = seen[0].std(dim=(1, 2))
        assert_close(memory, before)
        assert_close(seen[0].mean(), torch.tensor(0.0), atol=0.01, rtol=0)
        assert_close(deviation.mean(), torch.tensor(0.25), atol=0.01, rtol=0)  # uniform in 0..0.5
        assert float(deviation.max()) < 1.0 and float(deviation.min()) < 0.02

    def test_shards_of_a_batch_draw_the_same_noise(self):
        whole = tiny_smt(timesteps=0, memory_noise=1.0)
        memory = torch.zeros(4, 2, 8)
        expected = whole._noisy(memory, seeded())
        shards = []
        for index in range(2):
            whole.shard = BatchShard()
            whole.shard.index, whole.shard.count = index, 2
            shards.append(whole._noisy(memory[:2], seeded()))
        assert_close(torch.cat(shards), expected)
