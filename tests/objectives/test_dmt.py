import math
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
from memtrain.config import DMTConfig, EngineConfig, Stack
from memtrain.config.stages import STREAM_ROLLOUT
from memtrain.data.task import build_task
from memtrain.evaluation.cost import CountedCell, recurrent_depth, sequential_ops
from memtrain.objectives.dmt import DMT
from memtrain.shapes import IGNORE_INDEX, Batch
from memtrain.training.step import Trainer

BOTH = pytest.mark.parametrize("encoder", ENCODERS)
THROUGH_TIME = pytest.mark.parametrize("through_time", [False, True], ids=["one-step", "through"])


def tiny_dmt(encoder: str = "causal", cell: Any = None, **options: Any) -> DMT:
    return DMT(tiny_teacher(encoder), tiny_rnn(cell), DMTConfig(**options))


def record_teacher(objective: DMT) -> list[tuple]:
    """Every later call of the teacher's encoder, as (inputs, steps, memories)."""
    calls: list[tuple] = []
    objective.teacher.encode = recorded(calls, objective.teacher.encode)
    return calls


def record_rollout(objective: DMT) -> list[tuple]:
    """Every later rollout, as (inputs, first memory, memories)."""
    calls: list[tuple] = []
    objective.rnn.unroll = recorded(calls, objective.rnn.unroll)
    return calls


def naive_dmt(
    objective: DMT, batch: Batch, starts: list[int], labelled: list[int], length: int
) -> tuple[Tensor, Tensor]:
    """Dynamics and readout loss, row after row and step after step.

    Row r starts from the teacher's memory after step starts[r], or from the empty one at -1.
    """
    rnn, teacher = objective.rnn, objective.teacher
    dynamics, readout = [], []
    for row, start in enumerate(starts):
        inputs, targets = batch.inputs[row : row + 1], batch.targets[row : row + 1]
        memory = rnn.empty_memory(1)
        if start >= 0:
            memory = teacher.encode(inputs[:, : start + 1])[:, -1].detach()
        for k in range(length):
            t = start + 1 + k
            memory = rnn.cell(
                memory if objective.config.through_time else memory.detach(), inputs[:, t]
            )
            if k in labelled:
                label = teacher.encode(inputs[:, : t + 1])[:, -1].detach()
                dynamics.append((memory - label).square().mean())
            if targets[0, t] != IGNORE_INDEX:
                logits = rnn.predict(memory.detach())
                readout.append(F.cross_entropy(logits, targets[:, t]))
    return torch.stack(dynamics).mean(), torch.stack(readout).mean()


def assert_same_loss_and_gradients(objective: DMT, losses, naive: tuple[Tensor, Tensor]) -> None:
    dynamics, readout = naive
    config = objective.config
    assert_close(losses.parts["dynamics"], dynamics.detach(), atol=1e-5, rtol=1e-5)
    assert_close(losses.parts["readout"], readout.detach(), atol=1e-5, rtol=1e-5)
    expected = config.dynamics_weight * dynamics + config.readout_weight * readout
    assert_close(losses.total, expected, atol=1e-4, rtol=1e-5)
    parameters = list(objective.rnn.parameters())
    for one, other in zip(
        gradients(losses.total, parameters), gradients(expected, parameters), strict=True
    ):
        assert_close(one, other, atol=1e-4, rtol=1e-3)


class TestEquations:
    @BOTH
    @THROUGH_TIME
    def test_from_the_empty_memory_the_loss_equals_a_loop_over_steps(self, encoder, through_time):
        objective = tiny_dmt(encoder, through_time=through_time, readout_weight=0.5)
        batch = random_batch(2, 6)
        naive = naive_dmt(objective, batch, [-1, -1], list(range(6)), 6)
        assert_same_loss_and_gradients(objective, objective(batch, seeded()), naive)

    @BOTH
    @THROUGH_TIME
    def test_from_the_teachers_memories_the_loss_equals_a_loop_over_steps(
        self, encoder, through_time
    ):
        options = dict(through_time=through_time, rollout_length=4, label_stride=2)
        objective = tiny_dmt(encoder, **options, empty_start=0.5)
        batch, calls = random_batch(4, 9), record_teacher(objective)
        losses = objective(batch, seeded(1))
        (_, after, _), (_, label_steps, _) = calls
        starts = [-1, -1, *after[:, 0].tolist()]
        labelled = label_steps[0].tolist()
        assert labelled in ([0, 2], [1, 3])
        naive = naive_dmt(objective, batch, starts, labelled, 4)
        assert_same_loss_and_gradients(objective, losses, naive)

    def test_one_step_and_through_time_give_the_same_loss_and_other_gradients(self):
        batch = random_batch(3, 6)
        one, through = tiny_dmt(), tiny_dmt(through_time=True)
        losses = one(batch, seeded()), through(batch, seeded())
        assert_close(losses[0].total, losses[1].total)
        first = gradients(losses[0].total, one.rnn.cell.parameters())
        second = gradients(losses[1].total, through.rnn.cell.parameters())
        apart = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
        assert apart > 1e-3

    def test_the_total_weights_its_parts(self):
        losses = tiny_dmt(dynamics_weight=3.0, readout_weight=0.25)(random_batch(3, 6), seeded())
        dynamics, readout = losses.parts["dynamics"], losses.parts["readout"]
        assert_close(losses.total.detach(), 3 * dynamics + 0.25 * readout)
        assert not dynamics.requires_grad and not readout.requires_grad


class TestSegments:
    @BOTH
    @pytest.mark.parametrize("segment", [2, 3])
    def test_the_loss_equals_a_loop_over_the_steps_before_each_label(self, encoder, segment):
        objective = tiny_dmt(encoder, segment=segment, label_stride=3)
        batch, calls = random_batch(2, 7), record_teacher(objective)
        losses = objective(batch, seeded(2))
        labelled = calls[-1][1][0].tolist()
        assert min(labelled) >= segment - 1
        rnn, teacher = objective.rnn, objective.teacher
        states = [rnn.empty_memory(2)]
        for step in range(7):
            states.append(rnn.cell(states[-1], batch.inputs[:, step]).detach())
        dynamics = []
        for step in range(7):
            if step in labelled:
                memory = states[step + 1 - segment]
                for earlier in range(step + 1 - segment, step + 1):
                    memory = rnn.cell(memory, batch.inputs[:, earlier])
                label = teacher.encode(batch.inputs[:, : step + 1])[:, -1].detach()
                # A label that would lie beyond the end is the last one, and does not count.
                dynamics.append((memory - label).square().mean())
        valid = batch.targets != IGNORE_INDEX
        logits = rnn.predict(torch.stack(states[1:], dim=1)[valid])
        readout = F.cross_entropy(logits, batch.targets[valid])
        assert_same_loss_and_gradients(objective, losses, (torch.stack(dynamics).mean(), readout))

    @pytest.mark.parametrize("segment", [1, 2, 5, 50])
    def test_credit_passes_as_many_applications_of_the_cell(self, segment):
        objective = tiny_dmt(cell=CountedCell(tiny_cell()), segment=segment, label_stride=4)
        losses = objective(random_batch(2, 8), seeded())
        assert recurrent_depth(losses.total) == min(segment, 8)

    def test_the_value_of_the_loss_is_that_of_one_step(self):
        """The same rollout, gone through again: only gradients differ."""
        batch = random_batch(3, 6)
        one, two = (tiny_dmt(segment=count, label_stride=6) for count in (1, 6))
        last = torch.Generator().manual_seed(
            next(
                seed for seed in range(99) if int(torch.randint(6, (), generator=seeded(seed))) == 5
            )
        )
        state = last.get_state()
        first = one(batch, last).parts["dynamics"]
        last.set_state(state)
        assert_close(two(batch, last).parts["dynamics"], first)


class TestDecoding:
    @BOTH
    @THROUGH_TIME
    def test_the_loss_equals_a_loop_over_steps_and_targets(self, encoder, through_time):
        options = dict(dynamics_weight=0.0, readout_weight=0.0, decode_weight=0.5, future_length=3)
        objective = tiny_dmt(encoder, through_time=through_time, **options)
        batch = random_batch(2, 6)
        losses = objective(batch, seeded())
        memory, decoding, count = objective.rnn.empty_memory(2), torch.zeros(()), 0
        for step in range(6):
            token = batch.inputs[:, step]
            memory = objective.rnn.cell(memory if through_time else memory.detach(), token)
            future = batch.inputs[:, step + 1 : step + 3]
            logits = objective.teacher.decode(memory, future)
            for ahead in range(min(3, 6 - step)):
                due = batch.targets[:, step + ahead]
                decoding = decoding + F.cross_entropy(
                    logits[:, ahead], due, ignore_index=IGNORE_INDEX, reduction="sum"
                )
                count += int((due != IGNORE_INDEX).sum())
        assert_close(losses.parts["decode"], (decoding / count).detach())
        parameters = list(objective.rnn.cell.parameters())
        expected = gradients(0.5 * decoding / count, parameters)
        assert_close(gradients(losses.total, parameters), expected)

    def test_the_total_weights_the_decoding_loss(self):
        losses = tiny_dmt(decode_weight=0.5)(random_batch(3, 6), seeded())
        plain = tiny_dmt()(random_batch(3, 6), seeded())
        assert_close(losses.total, plain.total + 0.5 * losses.parts["decode"])

    def test_its_gradient_reaches_only_the_cell(self):
        objective = tiny_dmt(dynamics_weight=0.0, readout_weight=0.0, decode_weight=1.0)
        for parameter in objective.teacher.parameters():
            parameter.requires_grad_(False)  # as the trainer does
        total = objective(random_batch(3, 6), seeded()).total
        assert receives_gradient(total, objective.rnn.cell)
        assert not receives_gradient(total, objective.rnn.readout)

    def test_a_step_beyond_the_sequence_has_no_future(self):
        """Rollouts from the teacher's memory are idle once the sequence has ended."""
        objective = tiny_dmt(empty_start=0.0, decode_weight=1.0, future_length=1)
        batch = random_batch(4, 5, target_rate=1.0)
        calls = record_teacher(objective)
        losses = objective(batch, seeded())
        (_, after, start), _ = calls
        decoding = []
        for row in range(4):
            memory = start[row : row + 1, 0]
            for step in range(int(after[row, 0]) + 1, 5):
                memory = objective.rnn.cell(memory, batch.inputs[row : row + 1, step])
                logits = objective.teacher.predict(memory)
                decoding.append(F.cross_entropy(logits, batch.targets[row : row + 1, step]))
        assert_close(losses.parts["decode"], torch.stack(decoding).mean().detach())

    def test_a_stream_also_samples_the_future(self):
        context = tiny_teacher().config.context_length
        without = tiny_dmt(empty_start=0.5, rollout_length=7)
        assert without.tokens_needed() == context + 7
        with_it = tiny_dmt(empty_start=0.5, rollout_length=7, decode_weight=1.0, future_length=3)
        assert with_it.tokens_needed() == context + 10

    @pytest.mark.parametrize(("stream", "steps"), [(True, STREAM_ROLLOUT), (False, 0)])
    def test_default_rollout_length_is_bounded_on_streams_and_whole_otherwise(self, stream, steps):
        config = DMTConfig(empty_start=0.5, decode_weight=1.0, future_length=3)
        objective = DMT(tiny_teacher(), tiny_rnn(), config, stream=stream)
        length = objective.tokens_needed()
        assert length > STREAM_ROLLOUT
        _, through = objective._start(random_batch(2, length), seeded())
        assert through.shape[1] == (steps or length)


class TestGradients:
    @BOTH
    @THROUGH_TIME
    @pytest.mark.parametrize("empty_start", [1.0, 0.0], ids=["empty", "taught"])
    def test_the_teacher_gets_no_gradient(self, encoder, through_time, empty_start):
        objective = tiny_dmt(encoder, through_time=through_time, empty_start=empty_start)
        total = objective(random_batch(3, 6), seeded()).total
        assert not receives_gradient(total, objective.teacher)
        assert receives_gradient(total, objective.rnn.cell)
        assert receives_gradient(total, objective.rnn.readout)

    @THROUGH_TIME
    @pytest.mark.parametrize("empty_start", [1.0, 0.0], ids=["empty", "taught"])
    def test_the_readout_loss_does_not_reach_the_cell(self, through_time, empty_start):
        objective = tiny_dmt(
            through_time=through_time, empty_start=empty_start, dynamics_weight=0.0
        )
        total = objective(random_batch(3, 6), seeded()).total
        assert receives_gradient(total, objective.rnn.readout)
        assert not receives_gradient(total, objective.rnn.cell)

    @THROUGH_TIME
    def test_the_dynamics_loss_does_not_reach_the_readout(self, through_time):
        objective = tiny_dmt(through_time=through_time, readout_weight=0.0)
        total = objective(random_batch(3, 6), seeded()).total
        assert receives_gradient(total, objective.rnn.cell)
        assert not receives_gradient(total, objective.rnn.readout)

    @pytest.mark.parametrize("length", [4, 8, 16], ids=lambda n: f"T{n}")
    @pytest.mark.parametrize("empty_start", [1.0, 0.5], ids=["empty", "mixed"])
    def test_credit_passes_one_application_of_the_cell(self, length, empty_start):
        objective = tiny_dmt(cell=CountedCell(tiny_cell()), empty_start=empty_start)
        assert recurrent_depth(objective(random_batch(2, length), seeded()).total) == 1

    @pytest.mark.parametrize("length", [4, 8, 16], ids=lambda n: f"T{n}")
    def test_credit_through_time_passes_as_many_as_there_are_tokens(self, length):
        objective = tiny_dmt(cell=CountedCell(tiny_cell()), through_time=True)
        assert recurrent_depth(objective(random_batch(2, length), seeded()).total) == length


class TestLabels:
    @pytest.mark.parametrize("stride", [1, 3, 4], ids=lambda n: f"stride{n}")
    def test_every_nth_step_is_labelled_from_every_offset(self, stride):
        length = 10
        objective = tiny_dmt(label_stride=stride)
        calls, generator = record_teacher(objective), seeded()
        for _ in range(15 * stride):
            objective(random_batch(2, length), generator)
        offsets = set()
        for _, steps, _ in calls:
            offset = int(steps[0, 0])
            offsets.add(offset)
            expected = list(range(offset, length, stride))
            # Always as many: what would lie beyond the end is the last step, and does not count.
            expected += [length - 1] * (math.ceil(length / stride) - len(expected))
            assert steps.tolist() == 2 * [expected]
        assert offsets == set(range(stride))

    @THROUGH_TIME
    def test_a_label_beyond_the_end_does_not_count(self, through_time):
        """Of 5 steps with a label at every third, the second label may lie beyond the end."""
        objective = tiny_dmt(label_stride=3, through_time=through_time)
        batch, beyond = random_batch(2, 5), 0
        for seed in range(8):
            calls = record_teacher(objective)
            losses = objective(batch, seeded(seed))
            offset = int(calls[-1][1][0, 0])
            naive = naive_dmt(objective, batch, [-1, -1], list(range(offset, 5, 3)), 5)
            assert_same_loss_and_gradients(objective, losses, naive)
            beyond += offset == 2
        assert beyond

    def test_a_stride_beyond_the_rollout_labels_one_step_anywhere_in_it(self):
        objective = tiny_dmt(label_stride=50)
        calls, generator = record_teacher(objective), seeded()
        for _ in range(60):
            objective(random_batch(2, 5), generator)
        assert {tuple(steps[0].tolist()) for _, steps, _ in calls} == {(t,) for t in range(5)}


class TestReadout:
    def test_every_nth_memory_is_read_from_every_offset(self):
        objective = tiny_dmt(readout_stride=3)
        rollouts, generator = record_rollout(objective), seeded()
        seen = set()
        for _ in range(40):
            batch = random_batch(2, 8)
            losses = objective(batch, generator)
            memories = rollouts[-1][-1]
            by_offset = {}
            for offset in range(3):
                read = list(range(offset, 8, 3))  # the last steps too: 3 does not divide 8
                logits = objective.rnn.predict(memories[:, read])
                loss = F.cross_entropy(logits.flatten(0, 1), batch.targets[:, read].flatten())
                by_offset[offset] = loss.item()
            found = [
                o for o, loss in by_offset.items() if abs(loss - losses.parts["readout"]) < 1e-6
            ]
            assert len(found) == 1
            seen.update(found)
        assert seen == {0, 1, 2}


class TestStart:
    @BOTH
    def test_rollouts_from_the_teacher_start_right_after_its_step(self, encoder):
        objective = tiny_dmt(encoder, empty_start=0.0, rollout_length=3)
        calls, rollouts = record_teacher(objective), record_rollout(objective)
        batch, generator = random_batch(4, 8), seeded()
        seen = set()
        for _ in range(12):
            calls.clear()
            rollouts.clear()
            objective(batch, generator)
            (_, after, _), (_, labels, _) = calls
            ((inputs, memory, memories),) = rollouts
            assert memories.shape[1] == 3
            for row, (t,) in enumerate(after.tolist()):
                seen.add(t)
                taught = objective.teacher.encode(batch.inputs[row : row + 1, : t + 1])[0, -1]
                assert_close(memory[row], taught, atol=1e-5, rtol=0)
                assert inputs[row].tolist() == batch.inputs[row, t + 1 : t + 4].tolist()
                assert labels[row].tolist() == [t + 1, t + 2, t + 3]
        assert seen == {0, 1, 2, 3, 4}  # every step that leaves room for the rollout

    @pytest.mark.parametrize(
        ("empty_start", "rows", "taught"), [(1.0, 4, 0), (0.5, 4, 2), (0.25, 8, 6), (0.0, 4, 4)]
    )
    def test_empty_start_is_the_fraction_of_rollouts_from_the_empty_memory(
        self, empty_start, rows, taught
    ):
        objective = tiny_dmt(empty_start=empty_start, rollout_length=3)
        rollouts, batch = record_rollout(objective), random_batch(rows, 8)
        objective(batch, seeded())
        ((inputs, memory, _),) = rollouts
        from_empty = ~memory.flatten(1).any(1)
        assert int((~from_empty).sum()) == taught
        assert torch.equal(inputs[from_empty], batch.inputs[from_empty, :3])

    @pytest.mark.parametrize(
        ("rollout_length", "empty_start", "expected"),
        [
            (0, 1.0, 8),
            (3, 1.0, 3),
            (8, 1.0, 8),
            (50, 1.0, 8),
            (0, 0.5, 8),
            (3, 0.5, 3),
            (50, 0.0, 8),
        ],
    )
    def test_rollout_length_is_clipped_to_the_sequence(self, rollout_length, empty_start, expected):
        objective = tiny_dmt(rollout_length=rollout_length, empty_start=empty_start)
        rollouts = record_rollout(objective)
        objective(random_batch(4, 8), seeded())
        assert rollouts[0][0].shape == (4, expected)

    def test_the_part_of_a_rollout_beyond_the_sequence_is_idle(self):
        """Whole-length rollouts from a teacher's memory: only steps inside the sequence count."""
        objective = tiny_dmt(empty_start=0.0)
        batch = random_batch(3, 5, target_rate=1.0)
        losses = objective(batch, seeded(1))
        (after,) = torch.randint(4, (3, 1), generator=seeded(1)).unbind(1)
        squared, nats = [], []
        for row, start in enumerate(after.tolist()):
            labels = objective.teacher.encode(batch.inputs[row : row + 1])[0]
            memory = labels[start : start + 1]
            for t in range(start + 1, 5):
                memory = objective.rnn.cell(memory, batch.inputs[row, t : t + 1]).detach()
                squared.append((memory[0] - labels[t]).square().mean())
                logits = objective.rnn.predict(memory)[0]
                nats.append(-logits.log_softmax(-1)[batch.targets[row, t]])
        assert_close(losses.parts["dynamics"], torch.stack(squared).mean(), atol=1e-5, rtol=1e-5)
        assert_close(losses.parts["readout"], torch.stack(nats).mean(), atol=1e-5, rtol=1e-5)

    def test_sequences_of_one_token_have_finite_losses(self):
        losses = tiny_dmt(empty_start=0.5)(random_batch(2, 1, target_rate=1.0), seeded())
        assert bool(losses.total.isfinite())

    def test_readout_learns_from_the_rolled_out_steps_alone(self):
        batch = random_batch(2, 8, target_rate=1.0)
        later = batch.targets.clone()
        later[:, 3:] = (later[:, 3:] + 1) % VOCAB
        objective = tiny_dmt(rollout_length=3)
        losses = [objective(Batch(batch.inputs, y), seeded()) for y in (batch.targets, later)]
        assert losses[0].total.item() == losses[1].total.item()

    def test_without_any_target_the_readout_loss_is_zero(self):
        inputs = random_tokens(3, 5)
        losses = tiny_dmt()(Batch(inputs, torch.full_like(inputs, IGNORE_INDEX)), seeded())
        assert losses.parts["readout"] == 0
        assert losses.parts["dynamics"] > 0


@BOTH
def test_training_does_not_change_encoder_and_decoder(encoder):
    task = build_task(Stack(sequence_length=8, vocab_size=VOCAB, depth=3))
    objective = tiny_dmt(encoder, empty_start=0.5)
    stage = DMTConfig(steps=3, batch_size=4, learning_rate=1e-2)
    trainer = Trainer(objective, stage, task, Engine(EngineConfig(device="cpu")), seed=0)
    inputs, future = random_tokens(2, 8), random_tokens(2, 3)

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            memory = objective.teacher.encode(inputs)
            return [memory, objective.teacher.decode(memory[:, 0], future)]

    before = {name: value.clone() for name, value in objective.state_dict().items()}
    expected = outputs()
    with trainer.frozen_rest():
        assert not any(p.requires_grad for p in objective.teacher.parameters())
        for _ in range(3):
            trainer.train_step()
        assert all(p.grad is None for p in objective.teacher.parameters())
    assert all(p.requires_grad for p in objective.teacher.parameters())
    changed = {
        ".".join(name.split(".")[:2])
        for name, value in objective.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"rnn.cell", "rnn.readout"}
    assert all(torch.equal(a, b) for a, b in zip(outputs(), expected, strict=True))


class TestTrainingTeacher:
    OWN = dict(teacher_decode_weight=0.7, uniformity_weight=0.3, future_length=3)

    @BOTH
    @THROUGH_TIME
    def test_its_own_losses_are_those_of_its_memories(self, encoder, through_time):
        """Labels at every second step; those beyond the rollout do not count."""
        options: dict[str, Any] = dict(through_time=through_time, label_stride=2)
        objective = tiny_dmt(encoder, train_teacher=True, **options, **self.OWN)
        teacher, batch = objective.teacher, random_batch(3, 5, target_rate=1.0)
        frozen = tiny_dmt(encoder, **options)(batch, seeded(1))
        losses = objective(batch, seeded(1))
        for name, part in frozen.parts.items():
            assert torch.equal(losses.parts[name], part)

        labelled, counts = objective._labelled(5, seeded(1), batch.inputs.device)
        labelled = labelled[counts > 0].tolist()
        memory = teacher.encode(batch.inputs)[:, labelled]
        tokens = F.normalize(memory.flatten(0, 2), dim=-1)
        potentials = (-2 * torch.cdist(tokens, tokens).square()).exp()
        others = ~torch.eye(len(tokens), dtype=torch.bool)
        uniformity = potentials[others].mean().log()
        each = [
            F.cross_entropy(
                teacher.decode(
                    memory[row : row + 1, k], batch.inputs[row : row + 1, t + 1 : t + 3]
                )[0, : 5 - t],
                batch.targets[row, t : t + 3],
                reduction="none",
            )
            for row in range(3)
            for k, t in enumerate(labelled)
        ]
        decode = torch.cat(each).mean()
        assert_close(losses.parts["teacher_decode"], decode.detach(), atol=1e-5, rtol=1e-5)
        assert_close(losses.parts["uniformity"], uniformity.detach(), atol=1e-4, rtol=1e-4)
        own = list(teacher.parameters())
        expected = gradients(0.7 * decode + 0.3 * uniformity, own)
        for found, wanted in zip(gradients(losses.total, own), expected, strict=True):
            assert_close(found, wanted, atol=1e-5, rtol=1e-3)

    @BOTH
    @THROUGH_TIME
    def test_cell_and_readout_learn_as_with_a_frozen_teacher(self, encoder, through_time):
        batch, options = random_batch(3, 6), {"through_time": through_time, "empty_start": 0.4}
        frozen = tiny_dmt(encoder, **options)
        objective = tiny_dmt(encoder, train_teacher=True, **options)
        one, other = frozen(batch, seeded()).total, objective(batch, seeded()).total
        assert not receives_gradient(one, frozen.teacher)
        assert receives_gradient(other, objective.teacher)
        pairs = zip(frozen.rnn.parameters(), objective.rnn.parameters(), strict=True)
        for mine, its in pairs:
            assert torch.equal(*gradients(one, [mine]), *gradients(other, [its]))

    def test_the_distance_to_the_cell_does_not_train_it(self):
        objective = tiny_dmt(train_teacher=True, teacher_decode_weight=0.0, uniformity_weight=0.0)
        total = objective(random_batch(3, 6), seeded()).total
        assert not receives_gradient(total, objective.teacher)

    def test_it_is_clipped_apart_and_changes(self):
        task = build_task(Stack(sequence_length=8, vocab_size=VOCAB, depth=3))
        objective = tiny_dmt(train_teacher=True, empty_start=0.5)
        stage = DMTConfig(steps=3, batch_size=4, learning_rate=1e-2)
        trainer = Trainer(objective, stage, task, Engine(EngineConfig(device="cpu")), seed=0)
        before = [value.clone() for value in objective.teacher.parameters()]
        metrics = trainer.train_step()
        assert {"gradient_norm_teacher", "gradient_norm_cell"} <= metrics.keys()
        pairs = zip(before, objective.teacher.parameters(), strict=True)
        assert not any(torch.equal(old, new) for old, new in pairs)

    def test_a_stream_has_futures_to_decode(self):
        frozen, training = tiny_dmt(future_length=5), tiny_dmt(future_length=5, train_teacher=True)
        assert training.tokens_needed() == frozen.tokens_needed() + 5


@THROUGH_TIME
def test_sequential_operations_grow_by_the_same_number_for_every_token(through_time):
    objective = tiny_dmt(through_time=through_time)
    counts = []
    for length in (4, 5, 8, 12):
        batch, generator = random_batch(2, length), seeded()
        counts.append(sequential_ops(lambda b=batch, g=generator: objective(b, g).total))
    per_token = counts[1] - counts[0]
    assert per_token > 0
    assert [count - counts[0] for count in counts] == [0, per_token, 4 * per_token, 8 * per_token]


def test_the_step_from_the_empty_memory_counts_by_its_weight():
    """The first of three steps counts four times: (4 a + b + c) / 6."""
    batch = random_batch(2, 3, target_rate=1.0)
    plain = tiny_dmt(rollout_length=1)(batch, seeded()).parts["dynamics"]
    mean = tiny_dmt()(batch, seeded()).parts["dynamics"]
    weighted = tiny_dmt(start_weight=4.0)(batch, seeded()).parts["dynamics"]
    assert_close(weighted, (3 * plain + 3 * mean) / 6)
