"""Counts on models small enough to count by hand."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from memtrain.evaluation.cost import CountedCell, mark_application, recurrent_depth, sequential_ops

WIDTH = 4
CELL_OPERATIONS = 4  # of SmallCell: embedding parallel to linear, sum, linear, tanh


class SmallCell(nn.Module):
    """(memory, token) -> memory in four operations one after another."""

    memory_tokens, memory_dim = 2, WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return self.outer(self.inner(memory) + self.embedding(token)[:, None]).tanh()


@pytest.fixture
def cell() -> SmallCell:
    torch.manual_seed(0)
    return SmallCell()


def empty_memory(batch: int = 3) -> Tensor:
    return torch.zeros(batch, SmallCell.memory_tokens, SmallCell.memory_dim)


def tokens(steps: int, batch: int = 3) -> Tensor:
    return torch.tensor([[(row + step) % 5 for step in range(steps)] for row in range(batch)])


def unroll(cell: nn.Module, inputs: Tensor, detach_every: int | None = None) -> Tensor:
    memory = empty_memory(len(inputs))
    for step, token in enumerate(inputs.unbind(1)):
        if detach_every is not None and step % detach_every == 0:
            memory = memory.detach()
        memory = cell(memory, token)
    return memory


def count_without_grad(function) -> int:
    with torch.no_grad():
        return sequential_ops(function)


class TestSequentialOps:
    @pytest.mark.parametrize("length", [1, 2, 7])
    def test_a_chain_counts_each_link_and_twice_with_grad(self, length):
        chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(length)))
        x = torch.randn(2, WIDTH)
        assert count_without_grad(lambda: chain(x)) == length
        assert sequential_ops(lambda: chain(x)) == 2 * length

    def test_no_operations_count_zero(self):
        assert sequential_ops(lambda: None) == 0
        assert sequential_ops(lambda: torch.zeros(3)) == 0

    def test_parallel_branches_count_the_longest(self):
        x = torch.randn(2, WIDTH)
        assert sequential_ops(lambda: x.exp().exp().exp() + x.exp()) == 4
        assert sequential_ops(lambda: [x.exp() for _ in range(9)]) == 1

    def test_inputs_are_found_in_lists_and_keywords(self):
        x = torch.randn(2, WIDTH)
        assert sequential_ops(lambda: torch.cat([x, x.exp()]).exp()) == 2
        assert sequential_ops(lambda: F.linear(x, torch.eye(WIDTH), bias=x[0].exp())) == 2
        assert sequential_ops(lambda: torch.max(x.exp(), dim=1)[1] + 1) == 3

    def test_views_and_data_movement_count_nothing(self):
        def move(x: Tensor) -> Tensor:
            x = x.view(2, 2, 2).transpose(1, 2).reshape(4, 2).permute(1, 0).unsqueeze(0)
            x = x.expand(3, -1, -1)[:, :1].contiguous().clone().detach().to(torch.float64).mT
            x = torch.cat([torch.stack(x.chunk(2, dim=1)).flatten(), *x.unbind(0)[0].split(1)[0]])
            x = x.gather(0, torch.arange(len(x))).masked_fill(x > 0, 0.0)
            return F.pad(x, (1, 1)).flip(0).repeat(2)

        x = torch.randn(2, 4)
        assert sequential_ops(lambda: move(x)) == 1  # the comparison x > 0
        assert sequential_ops(lambda: move(x.exp()).exp()) == 3

    def test_a_constructor_does_not_depend_on_the_tensor_whose_shape_it_copies(self):
        x = torch.randn(2, 4)
        assert sequential_ops(lambda: torch.zeros_like(x.exp().exp()).exp()) == 2
        assert sequential_ops(lambda: x.exp().exp().new_ones(3).exp()) == 2

    def test_a_loop_grows_with_time_and_a_batched_application_does_not(self, cell):
        for steps in (1, 5, 20):
            inputs = tokens(steps)
            assert count_without_grad(lambda i=inputs: unroll(cell, i)) == steps * CELL_OPERATIONS
            assert sequential_ops(lambda i=inputs: unroll(cell, i)) == 2 * steps * CELL_OPERATIONS
            rows = inputs.flatten()
            assert sequential_ops(lambda r=rows: cell(empty_memory(len(r)), r)) == (
                2 * CELL_OPERATIONS
            )

    def test_a_rollout_without_grad_and_one_differentiable_step(self, cell):
        def one_step_after_rollout() -> Tensor:
            with torch.no_grad():
                memory = unroll(cell, tokens(6))
            return cell(memory, tokens(1)[:, 0])

        assert sequential_ops(one_step_after_rollout) == 6 * CELL_OPERATIONS + 2 * CELL_OPERATIONS

    def test_backpropagation_does_not_follow_a_detached_branch(self):
        x = torch.randn(2, WIDTH, requires_grad=True)

        def regress_to_teacher(detach: bool) -> Tensor:
            teacher = x.exp().exp().exp().exp()  # 4 forward
            return x.exp() - (teacher.detach() if detach else teacher)  # 1 more

        assert sequential_ops(lambda: regress_to_teacher(detach=False)) == 5 + 5
        # The longest tensor backwards is the teacher itself: 4 + 4; the loss has 5 + 2.
        assert sequential_ops(lambda: regress_to_teacher(detach=True)) == 4 + 4

    def test_backpropagation_waits_for_a_forward_branch_without_grad(self):
        x = torch.randn(2, WIDTH, requires_grad=True)
        label = torch.randn(2, WIDTH)
        assert sequential_ops(lambda: x.exp() - label.exp().exp().exp()) == 4 + 2

    def test_results_do_not_depend_on_batch_size(self, cell):
        counts = {sequential_ops(lambda b=b: unroll(cell, tokens(4, b))) for b in (1, 2, 16)}
        assert counts == {2 * 4 * CELL_OPERATIONS}

    def test_counting_twice_gives_the_same(self, cell):
        first = sequential_ops(lambda: unroll(cell, tokens(4)))
        assert first == sequential_ops(lambda: unroll(cell, tokens(4)))

    def test_a_graph_made_before_the_count_is_not_counted(self, cell):
        memory = unroll(cell, tokens(4))
        assert sequential_ops(lambda: memory.exp()) == 2

    def test_backward_and_the_optimizer_add_nothing(self, cell):
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

        def train_step() -> None:
            unroll(cell, tokens(4)).sum().backward()
            optimizer.step()

        assert sequential_ops(train_step) == 2 * (4 * CELL_OPERATIONS + 1)

    def test_autograd_grad_counts_as_backpropagation(self):
        x = torch.randn(2, requires_grad=True)

        def gradient() -> Tensor:
            return torch.autograd.grad(x.exp().exp().sum(), x)[0].exp()

        assert sequential_ops(gradient) == 3 + 3 + 1

    def test_intermediate_tensors_are_not_kept_alive(self):
        seen = []

        def chain() -> int:
            x = torch.randn(2)
            for _ in range(50):
                x = x.exp()
                seen.append(weakref.ref(x))
            gc.collect()
            return sum(reference() is not None for reference in seen)

        alive = []
        assert sequential_ops(lambda: alive.append(chain())) == 50
        assert alive == [1]


class TestInPlaceWrites:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_a_written_item_carries_its_depth(self, cell, mode):
        def written_step_by_step() -> Tensor:
            out = torch.zeros(3, 5, *empty_memory().shape[1:])
            memory = empty_memory()
            for step, token in enumerate(tokens(5).unbind(1)):
                memory = cell(memory, token)
                out[:, step] = memory
            return out.sum()

        with mode():
            passes = 2 if torch.is_grad_enabled() else 1
            assert sequential_ops(written_step_by_step) == passes * (5 * CELL_OPERATIONS + 1)

    def test_a_written_item_read_again_extends_the_chain(self):
        def recurrence_in_a_buffer() -> None:
            buffer = torch.zeros(6, WIDTH)
            for step in range(5):
                buffer[step + 1] = buffer[step].exp()

        assert sequential_ops(recurrence_in_a_buffer) == 5

    @pytest.mark.parametrize(
        "write, cost",
        [
            (lambda x, y: x.copy_(y), 0),
            (lambda x, y: x.add_(y), 1),
            (lambda x, y: x.__iadd__(y), 1),
            (lambda x, y: x.masked_fill_(y > 0, 0.0), 1),  # the comparison
            (lambda x, y: x[0].copy_(y[0]), 0),
            (lambda x, y: torch.exp(y, out=x), 1),
            (lambda x, y: F.relu(x.copy_(y), inplace=True), 1),
        ],
        ids=["copy_", "add_", "+=", "masked_fill_", "copy_ to a view", "out=", "inplace=True"],
    )
    def test_the_written_tensor_and_its_older_views_get_the_depth(self, write, cost):
        def read_through_an_older_view() -> Tensor:
            x = torch.zeros(2, WIDTH)
            view = x.view(-1)
            write(x, torch.randn(2, WIDTH).exp().exp())
            return view.exp()

        assert sequential_ops(read_through_an_older_view) == 2 + cost + 1

    def test_gradients_pass_through_a_written_view(self):
        weight = torch.randn(WIDTH, requires_grad=True)

        def write() -> Tensor:
            x = torch.zeros(2, WIDTH)
            x[0].copy_(weight.exp().exp())
            return x.exp()

        assert sequential_ops(write) == 2 * 3


def written_out_gru(cell: nn.GRUCell, x: Tensor, state: Tensor) -> Tensor:
    from_input = F.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, dim=1)
    from_state = F.linear(state, cell.weight_hh, cell.bias_hh).chunk(3, dim=1)
    reset = torch.sigmoid(from_input[0] + from_state[0])
    update = torch.sigmoid(from_input[1] + from_state[1])
    proposal = torch.tanh(from_input[2] + reset * from_state[2])
    return (1 - update) * proposal + update * state


def written_out_lstm(
    cell: nn.LSTMCell, x: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    gates = F.linear(x, cell.weight_ih, cell.bias_ih) + F.linear(
        state[0], cell.weight_hh, cell.bias_hh
    )
    i, f, g, o = gates.chunk(4, dim=1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class TestTable:
    def test_attention_counts_scores_softmax_and_sum(self):
        x = torch.randn(2, 1, 5, WIDTH)
        assert sequential_ops(lambda: F.scaled_dot_product_attention(x, x, x)) == 3
        assert sequential_ops(lambda: (x @ x.mT).softmax(-1) @ x) == 3

    @pytest.mark.parametrize("training", [True, False])
    def test_multihead_attention_is_not_counted_twice(self, training):
        attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).train(training)
        x = torch.randn(2, 5, WIDTH)
        assert count_without_grad(lambda: attention(x, x, x)) == 1 + 3 + 1
        assert sequential_ops(lambda: attention(x, x, x)) == 2 * (1 + 3 + 1)

    def test_layers_count_as_whole_operations(self):
        x, ids = torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.long)
        norms = nn.Sequential(nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Softmax(-1))
        assert count_without_grad(lambda: norms(x)) == 4
        assert count_without_grad(lambda: nn.Embedding(3, WIDTH)(ids)) == 1
        assert sequential_ops(lambda: F.cross_entropy(x, ids)) == 1

    def test_dropout_counts_only_when_it_does_something(self):
        dropout, x = nn.Dropout(0.5), torch.randn(2, WIDTH)
        assert sequential_ops(lambda: dropout(x.exp()).exp()) == 3
        dropout.eval()
        assert sequential_ops(lambda: dropout(x.exp()).exp()) == 2

    def test_fused_cells_cost_the_same_as_written_out(self):
        x, state = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
        gru, lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        torch.testing.assert_close(written_out_gru(gru, x, state), gru(x, state))
        pair = (state, state)
        torch.testing.assert_close(written_out_lstm(lstm, x, pair), lstm(x, pair))
        for fused, written in (
            (lambda: gru(x, state), lambda: written_out_gru(gru, x, state)),
            (lambda: lstm(x, pair), lambda: written_out_lstm(lstm, x, pair)),
        ):
            assert sequential_ops(fused) == sequential_ops(written)
            assert count_without_grad(fused) == count_without_grad(written)
        assert count_without_grad(lambda: nn.RNNCell(WIDTH, WIDTH)(x, state)) == 3

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_fused_loops_cost_their_steps(self, batch_first):
        x = torch.randn((2, 7, WIDTH) if batch_first else (7, 2, WIDTH))
        gru = nn.GRU(WIDTH, WIDTH, batch_first=batch_first)
        one = count_without_grad(lambda: nn.GRUCell(WIDTH, WIDTH)(torch.randn(2, WIDTH)))
        assert count_without_grad(lambda: gru(x)) == 7 * one
        assert sequential_ops(lambda: gru(x)) == 2 * 7 * one
        stacked = nn.GRU(WIDTH, WIDTH, num_layers=3, batch_first=batch_first)
        assert count_without_grad(lambda: stacked(x)) == (7 + 3 - 1) * one
        both_ways = nn.GRU(WIDTH, WIDTH, 3, batch_first=batch_first, bidirectional=True)
        assert count_without_grad(lambda: both_ways(x)) == 7 * 3 * one
        packed = pack_padded_sequence(x, torch.tensor([7, 4]), batch_first)
        assert count_without_grad(lambda: gru(packed)) == 7 * one
        cells = count_without_grad(lambda: nn.LSTMCell(WIDTH, WIDTH)(torch.randn(2, WIDTH)))
        assert count_without_grad(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=batch_first)(x)) == (
            7 * cells
        )

    def test_a_transformer_layer_counts(self):
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=True).eval()
        x = torch.randn(2, 5, WIDTH)
        # norm, attention (5), sum; norm, linear, relu, linear, sum
        assert count_without_grad(lambda: layer(x)) == 7 + 5


class Cube(torch.autograd.Function):
    """Two operations forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class TestUnusualOperations:
    def test_a_custom_function_counts_its_forward_and_one_backward(self):
        x = torch.randn(2, requires_grad=True)
        assert sequential_ops(lambda: Cube.apply(x.exp())) == (1 + 2) + (1 + 1)
        assert sequential_ops(lambda: Cube.apply(x.exp()).exp()) == (1 + 2 + 1) + (1 + 1 + 1)

    def test_marks_are_free(self, cell):
        counted = CountedCell(cell)
        assert sequential_ops(lambda: unroll(counted, tokens(4))) == 2 * 4 * CELL_OPERATIONS

    def test_tensors_without_storage_and_transforms_do_not_raise(self):
        x = torch.randn(3, 3)
        assert sequential_ops(lambda: torch.sparse.mm(x.exp().to_sparse(), x)) >= 2
        assert sequential_ops(lambda: torch.func.vmap(torch.exp)(x)) >= 1
        assert sequential_ops(lambda: torch.func.grad(lambda y: y.exp().sum())(x)) >= 1

    def test_a_count_inside_a_count(self):
        x = torch.randn(3)
        inner = []
        assert sequential_ops(lambda: inner.append(sequential_ops(lambda: x.exp().exp()))) == 2
        assert inner == [2]


class TestRecurrentDepth:
    @pytest.mark.parametrize("steps", [1, 2, 9])
    def test_unrolling_has_a_path_of_all_steps(self, cell, steps):
        assert recurrent_depth(unroll(CountedCell(cell), tokens(steps)).sum()) == steps

    def test_a_time_parallel_application_has_a_path_of_one(self, cell):
        rows = tokens(9).flatten()
        assert recurrent_depth(CountedCell(cell)(empty_memory(len(rows)), rows).sum()) == 1

    def test_detached_or_unmarked_tensors_have_no_path(self, cell):
        assert recurrent_depth(unroll(CountedCell(cell), tokens(3)).sum().detach()) == 0
        assert recurrent_depth(unroll(cell, tokens(3)).sum()) == 0
        with torch.no_grad():
            assert recurrent_depth(unroll(CountedCell(cell), tokens(3)).sum()) == 0

    @pytest.mark.parametrize("every", [1, 3, 4])
    def test_truncation_bounds_the_path(self, cell, every):
        counted = CountedCell(cell)
        inputs = tokens(12)
        assert recurrent_depth(unroll(counted, inputs, detach_every=every).sum()) == every

    def test_the_longest_of_several_paths_counts(self, cell):
        counted = CountedCell(cell)
        loss = unroll(counted, tokens(2)).sum() + unroll(counted, tokens(5)).sum()
        assert recurrent_depth(loss) == 5

    def test_a_deep_graph_with_exponentially_many_paths(self):
        memory = torch.zeros(1, 1, 1, requires_grad=True)
        x = memory
        for _ in range(5000):
            x = mark_application(x + x)
        assert recurrent_depth(x.sum()) == 5000

    def test_a_deep_graph_from_before_the_count(self):
        x = torch.zeros(1, requires_grad=True)
        for _ in range(5000):
            x = x + x
        assert sequential_ops(lambda: x.exp()) == 2

    @pytest.mark.parametrize("end", ["return x", "return None", "x.sum().backward()", "1 / 0"])
    def test_a_deep_graph_is_counted_and_freed_on_a_small_stack(self, end):
        """However `function` leaves its graph. An overflow would end the process, so: another."""
        done = subprocess.run([sys.executable, "-c", DEEP_COUNT.format(end=end)])
        assert done.returncode == 0


DEEP_COUNT = """
import threading
import torch
from memtrain.evaluation.cost import sequential_ops

def chain():
    x = torch.ones(2, requires_grad=True)
    for _ in range(20_000):
        x = x * 1.0
    {end}

def count():
    try:
        sequential_ops(chain)
    except ZeroDivisionError:
        pass

threading.stack_size(2**20)
thread = threading.Thread(target=count)
thread.start()
thread.join()
"""


class TestCountedCell:
    def test_outputs_and_gradients_equal_the_cell(self, cell):
        inputs = tokens(5)
        plain, counted = unroll(cell, inputs), unroll(CountedCell(cell), inputs)
        torch.testing.assert_close(counted, plain, rtol=0, atol=0)
        parameters = list(cell.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(counted.square().sum(), parameters),
            torch.autograd.grad(plain.square().sum(), parameters),
            rtol=0,
            atol=0,
        )

    def test_sizes_and_parameters_equal_the_cell(self, cell):
        counted = CountedCell(cell)
        assert (counted.memory_tokens, counted.memory_dim) == (2, WIDTH)
        assert list(counted.parameters()) == list(cell.parameters())

    def test_the_result_may_be_modified_in_place(self, cell):
        memory = CountedCell(cell)(empty_memory(), tokens(1)[:, 0]).mul_(2)
        memory.sum().backward()
        assert recurrent_depth(memory) == 1
