"""Rollouts through CUDA graphs, with plain calls instead of the graphs."""

import gc
import threading
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from conftest import random_tokens, seeded, tiny_cell, tiny_rnn
from memtrain.accel import cuda_graphs as graphs
from memtrain.accel.cuda_graphs import (
    CHUNK,
    GraphedRollouts,
    RolloutKernels,
    captured,
    chunk_sizes,
)
from memtrain.accel.fast_paths import loops
from memtrain.generation.sampling import sample
from memtrain.models.cells import TransformerCell
from memtrain.models.layers import Stack
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler


class CountingStack:
    """A fast stack that counts how often weights are taken over, and serves nothing."""

    def __init__(self) -> None:
        self.refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1

    def serves(self, x: Tensor) -> bool:
        return False

    def __call__(self, x: Tensor, queries: slice, causal: bool, head: nn.Linear | None) -> Tensor:
        raise AssertionError("serves nothing")


class IdleCell:
    """A fast cell that serves nothing."""

    def serves(self, memory: Tensor) -> bool:
        return False

    def __call__(self, memory: Tensor, token: Tensor) -> Tensor:
        raise AssertionError("serves nothing")


class PlainChunk:
    """_Chunk without its graph."""

    def __init__(self, steps, inputs, memory, precision) -> None:
        self.steps, self.buffer = steps, inputs

    def run(self, inputs: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        assert (inputs.shape, inputs.dtype) == (self.buffer.shape, self.buffer.dtype)
        return self.steps(inputs, memory)


@pytest.fixture
def rnn(monkeypatch) -> RNN:
    monkeypatch.setattr(graphs, "_Chunk", PlainChunk)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tiny_rnn()


def idle_kernels(rnn: RNN) -> RolloutKernels:
    assert isinstance(rnn.cell, TransformerCell)
    assert isinstance(rnn.readout.stack, Stack)
    stacks = {rnn.cell.stack: CountingStack(), rnn.readout.stack: CountingStack()}
    return RolloutKernels(stacks, {rnn.cell: IdleCell()})


def refreshed(parts: RolloutKernels) -> list[int]:
    return [fast.refreshed for fast in parts.stacks.values() if isinstance(fast, CountingStack)]


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_chunks_add_up_to_the_length(length):
    assert sum(chunk_sizes(length)) == length
    assert set(chunk_sizes(length)) <= {1, CHUNK}


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 3])
class TestRollouts:
    def test_unroll_equals_the_plain_loop(self, rnn, length):
        inputs = random_tokens(3, length)
        with torch.no_grad():
            expected = rnn.unroll(inputs)
            loops(rnn).graphs = graphed = GraphedRollouts(rnn, nullcontext, idle_kernels(rnn))
            assert_close(rnn.unroll(inputs), expected)
        assert len(graphed.chunks) == len(set(chunk_sizes(length)))

    def test_write_equals_the_plain_loop(self, rnn, length):
        memory = rnn.empty_memory(3)
        uniforms = torch.rand(length, 3, generator=seeded())
        chosen = []

        def fast_choice(choose):
            chosen.append(choose)
            return choose

        with torch.no_grad():
            expected, after = rnn.write(memory, uniforms, Sampler())
            kernels = idle_kernels(rnn)
            loops(rnn).graphs = GraphedRollouts(rnn, nullcontext, kernels, fast_choice)
            tokens, fast_after = rnn.write(memory, uniforms, Sampler())
            rnn.write(memory, uniforms, Sampler())
        assert tokens.tolist() == expected.tolist()
        assert_close(fast_after, after)
        assert chosen == [Sampler()] * len(set(chunk_sizes(length)))


def test_training_and_inference_use_separate_graphs(rnn):
    loops(rnn).graphs = graphed = GraphedRollouts(rnn, nullcontext, idle_kernels(rnn))
    for mode in (True, False, True):
        rnn.train(mode)
        with torch.no_grad():
            rnn.unroll(random_tokens(2, CHUNK))
    assert len(graphed.chunks) == 2


def test_precompiling_leaves_no_graph_behind(rnn):
    loops(rnn).graphs = graphed = GraphedRollouts(rnn, nullcontext, idle_kernels(rnn))
    graphed.precompiling = True
    steps = []
    graphed.rnn.cell.register_forward_hook(lambda *_: steps.append(1))
    with torch.no_grad():
        memories = rnn.unroll(random_tokens(2, CHUNK))
    assert memories.shape[:2] == (2, CHUNK) and memories.is_contiguous()
    assert len(steps) == 1  # the others launch the same kernels
    assert not graphed.chunks


def test_weights_are_refreshed_once_per_call_and_not_per_chunk(rnn):
    parts = idle_kernels(rnn)
    loops(rnn).graphs = GraphedRollouts(rnn, nullcontext, parts)
    sample(rnn, random_tokens(2, 2 * CHUNK), 3 * CHUNK, seeded())
    assert refreshed(parts) == [2, 2]  # the prompt, and what is written
    memory, uniforms = rnn.empty_memory(2), torch.rand(1, 2)
    with torch.no_grad():
        for _ in range(2):
            rnn.write(memory, uniforms, Sampler())
    assert refreshed(parts) == [4, 4]


def test_rollout_kernels_are_used_only_while_active(rnn):
    parts = idle_kernels(rnn)
    pairs = [*parts.stacks.items(), *parts.cells.items()]
    with pytest.raises(ZeroDivisionError), parts.active():
        assert all(module.fast is fast for module, fast in pairs)
        raise ZeroDivisionError
    assert all(module.fast is None for module, _ in pairs)


def test_a_cell_without_kernels_uses_the_plain_loop(rnn):
    rnn = tiny_rnn(tiny_cell("gru"))
    inputs = random_tokens(2, 3)
    with torch.no_grad():
        expected = rnn.unroll(inputs)
        loops(rnn).graphs = GraphedRollouts(rnn, nullcontext)
        assert_close(rnn.unroll(inputs), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_checkpoint_may_be_fetched_while_a_graph_is_captured():
    over, fetched = threading.Event(), []

    def fetch() -> None:
        """As saving.py does: pins memory and waits for a stream."""
        stream = torch.cuda.Stream()
        while not over.is_set():
            held = torch.empty(2**20 + 4096 * len(fetched), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(stream):
                held.copy_(torch.zeros_like(held, device="cuda"), non_blocking=True)
            stream.synchronize()
            fetched.append(len(held))

    other = threading.Thread(target=fetch)
    other.start()
    try:
        for _ in range(20):
            x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
            before = len(fetched)
            while len(fetched) == before:
                pass
            with captured(graph):
                for _ in range(300):
                    x += 1
            graph.replay()
            assert x.tolist() == [300.0] * 8
    finally:
        over.set()
        other.join()


class Cycle:
    """Lies in a cycle, as the graphs of a run do, so that only the collector frees it."""

    def __init__(self, held: object = None) -> None:
        self.held, self.itself = held, self


class NoGraph(torch.cuda.CUDAGraph):
    """A graph that can be made without a GPU."""

    def __new__(cls) -> "NoGraph":
        return object.__new__(cls)

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_runs_before_a_capture_and_not_during_it(monkeypatch, collecting):
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    old = weakref.ref(Cycle())
    assert old() is not None
    (gc.enable if collecting else gc.disable)()
    try:
        with suppress(KeyError), captured(NoGraph()):
            assert old() is None
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_old_graphs_in_cycles_do_not_break_a_capture():
    x, thresholds = torch.zeros(8, device="cuda"), gc.get_threshold()
    for number in range(1, 9):
        graph = torch.cuda.CUDAGraph()
        try:
            gc.set_threshold(1, 1, 1)  # collect at almost every allocation
            with captured(graph):
                for _ in range(50):
                    x += 1
                    Cycle()
        finally:
            gc.set_threshold(*thresholds)
        graph.replay()
        assert x.tolist() == [50.0 * number] * 8
        Cycle(graph)
        del graph
