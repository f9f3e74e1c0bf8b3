"""Compiling kernels ahead of time, without launching them."""

import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import pytest
import torch

pytest.importorskip("triton")


class Kernel:
    calls: list[tuple] = []

    def run(self, *args, grid, warmup, **options):
        self.calls.append((args[1:], warmup, options))


def test_each_kind_of_call_is_compiled_once_and_none_is_launched():
    from memtrain.accel.triton.common import precompile

    kernel = Kernel()
    real = Kernel.run
    with precompile(Kernel, wait=True):
        for size in (4, 4, 8, 4):
            kernel.run(torch.zeros(size), 3, grid=(1,), warmup=False, BLOCK=size)
    assert Kernel.run is real
    expected = [((3,), True, {"BLOCK": 4}), ((3,), True, {"BLOCK": 8})]
    assert sorted(Kernel.calls, key=lambda call: call[2]["BLOCK"]) == expected


def test_compilation_continues_in_the_background():
    from memtrain.accel.triton.common import precompile

    class Slow:
        compiled, released = False, Event()

        def run(self, *args, grid, warmup):
            Slow.released.wait(10)
            Slow.compiled = True

    with precompile(Slow):
        Slow().run(1, grid=(1,), warmup=False)
    assert not Slow.compiled
    Slow.released.set()
    deadline = time.monotonic() + 10
    while not Slow.compiled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Slow.compiled


def test_rollouts_are_marked_while_their_kernels_are_compiled():
    from memtrain.accel.cuda_graphs import GraphedRollouts
    from memtrain.accel.engine import Engine
    from memtrain.accel.fast_paths import loops
    from memtrain.config import EngineConfig
    from memtrain.recipes import recipe
    from memtrain.training.run import Run

    rnn = Run(recipe("retrieval"), Path("unwritten")).rnn
    loops(rnn).graphs = rollout = GraphedRollouts(rnn, nullcontext)
    engine, seen = Engine(EngineConfig(device="cpu")), []
    engine.precompile(rnn, lambda: seen.append(rollout.precompiling))
    assert not seen  # nothing to compile
    engine.kernels = True
    with pytest.raises(ZeroDivisionError):
        engine.precompile(rnn, lambda: seen.append(rollout.precompiling) or 1 / 0)
    assert seen == [True] and not rollout.precompiling
