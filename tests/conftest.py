"""Tiny models and sequences that the tests share: `from conftest import tiny_teacher`."""

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.config import (
    BPTTConfig,
    CellConfig,
    Digits,
    DMTConfig,
    LogConfig,
    Retrieval,
    RunConfig,
    SMTConfig,
    TeacherConfig,
    model_shapes,
)
from memtrain.models.cells import build_cell
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder, Teacher
from memtrain.shapes import IGNORE_INDEX, Batch
from memtrain.training.console import Reporter
from memtrain.training.run import Run

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start, too
with suppress(ImportError):  # a GPU machine may lack it
    from hypothesis import settings

    settings.register_profile("memtrain", deadline=None)  # no timed tests
    settings.load_profile("memtrain")


def import_kernels() -> None:
    """Import the Triton kernels without jaxtyping's hook: Triton cannot compile functions that it
    has wrapped."""
    hooks = [hook for hook in sys.meta_path if type(hook).__module__.startswith("jaxtyping")]
    sys.meta_path[:] = [hook for hook in sys.meta_path if hook not in hooks]
    try:
        from memtrain.accel import hopper

        importlib.import_module("memtrain.accel.triton.block")
        importlib.import_module("memtrain.accel.triton.rollout_step")
        compiled = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
        if compiled and hopper.why_off(torch.device("cuda", 0)) is None:
            for name in HOPPER:
                importlib.import_module(f"memtrain.accel.hopper.{name}")
    finally:
        sys.meta_path[:0] = hooks


HOPPER = ("linear", "attention", "attention_backward", "rollout_attention", "rollout_mlp")
if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    import_kernels()  # before a run on the GPU imports them with the hook

VOCAB = 7
ENCODERS = ("bidirectional", "causal")

TINY = RunConfig(
    name="tiny",
    data=Retrieval(sequence_length=6, vocab_size=4),
    **model_shapes(
        encoder="causal",
        context_length=6,
        width=16,
        layers=(1, 1, 1),
        heads=2,
        head_dim=8,
        memory_tokens=2,
        memory_dim=8,
    ),
    smt=SMTConfig(steps=12, batch_size=4, timesteps=0, future_length=6, learning_rate=1e-2),
    dmt=DMTConfig(steps=8, batch_size=4, learning_rate=1e-3),
    bptt=BPTTConfig(steps=4, batch_size=4),
    log=LogConfig(every=2, evaluate_every=5, evaluate_sequences=8, checkpoint_every=5),
)
"""A whole run of all three stages in well under a second."""


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Ctrl-C and a hang-up do what they do in a terminal, here and in processes that are started;
    a shell has processes in its background ignore the one, nohup the other."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def trained_tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`TINY`, trained to its end. Tests only read it; one that writes copies its folder."""
    return Run.create(TINY, tmp_path_factory.mktemp("tiny") / "run").train(Reporter())


@pytest.fixture(scope="session")
def trained_digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of digits, trained for a step each of SMT and DMT. Tests only read it."""
    once = {name: replace(getattr(TINY, name), steps=1) for name in ("smt", "dmt")}
    bptt = replace(TINY.bptt, steps=0)
    config = replace(TINY, name="digits", data=Digits(), bptt=bptt, **once)
    return Run.create(config, tmp_path_factory.mktemp("digits") / "trained").train(Reporter())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_config(encoder: Any = "bidirectional", **options: Any) -> TeacherConfig:
    sizes = dict(context_length=8, width=16, encoder_layers=2, decoder_layers=2)
    return TeacherConfig(encoder=encoder, **{**sizes, "heads": 2, "head_dim": 8, **options})


def tiny_teacher(
    encoder: str = "bidirectional",
    *,
    memory_tokens: int = 2,
    memory_dim: int = 16,
    seed: int = 0,
    **options: Any,
) -> Teacher:
    """Two layers of width 16; `options` go to its TeacherConfig."""
    torch.manual_seed(seed)
    return Teacher(tiny_config(encoder, **options), VOCAB, memory_tokens, memory_dim)


def tiny_cell(kind: str = "transformer", *, seed: int = 1, **options: Any) -> nn.Module:
    """One layer of width 16 with a memory of 2 x 16; `options` go to its CellConfig."""
    torch.manual_seed(seed)
    sizes = dict(memory_tokens=2, memory_dim=16, width=16, layers=1, heads=2, head_dim=8)
    return build_cell(CellConfig(kind=kind, **{**sizes, **options}), VOCAB)


def tiny_rnn(cell: Any = None, *, seed: int = 2, **options: Any) -> RNN:
    """A Transformer cell, unless given another, under a readout of the tiny teacher's shape."""
    cell = tiny_cell() if cell is None else cell
    torch.manual_seed(seed)
    return RNN(cell, Decoder(tiny_config(**options), VOCAB, cell.memory_dim))


def plain_loop(cell: nn.Module, inputs: Tensor, memory: Tensor) -> Tensor:
    """What every faster way of unrolling a cell has to give."""
    memories = []
    for token in inputs.unbind(1):
        memory = cell(memory, token)
        memories.append(memory)
    return torch.stack(memories, dim=1)


def assert_unrolls_as_the_loop(
    unroll: Callable[[nn.Module, Tensor, Tensor], Tensor],
    cell: nn.Module,
    inputs: Tensor,
    memory: Tensor,
) -> None:
    """The loop's memories, and its gradients of everything, in fp64."""
    memory.requires_grad_()
    expected, found = plain_loop(cell, inputs, memory), unroll(cell, inputs, memory)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    direction, wanted = torch.randn_like(expected), [memory, *cell.parameters()]
    gradients = torch.autograd.grad((found * direction).sum(), wanted)
    references = torch.autograd.grad((expected * direction).sum(), wanted)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-8)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=seeded(seed))


def random_batch(rows: int, length: int, *, seed: int = 0, target_rate: float = 0.6) -> Batch:
    """Random inputs and targets; a share of the positions, the last one always, asks."""
    targets = random_tokens(rows, length, seed=seed + 1)
    chosen = torch.rand(rows, length, generator=seeded(seed + 2)) < target_rate
    chosen[:, -1] = True
    return Batch(random_tokens(rows, length, seed=seed), targets.where(chosen, IGNORE_INDEX))


def gradients(loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradient of each parameter, zeros where none arrives."""
    wanted = list(parameters)
    found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(wanted, found, strict=True)
    ]


def receives_gradient(loss: Tensor, module: nn.Module) -> bool:
    return any(bool(gradient.any()) for gradient in gradients(loss, module.parameters()))


def other_token(tokens: Tensor) -> Tensor:
    """A different token at every place."""
    return (tokens + 1) % VOCAB


def recorded(calls: list[tuple], function: Callable) -> Callable:
    """The function, which also notes its arguments (without those by name) and its result."""

    def call(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        calls.append((*args, result))
        return result

    return call


def load_script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class InlinePool:
    """Runs jobs in this process: a spawned one could not import a script by its name."""

    def __init__(self, *_): ...
    def __enter__(self):
        return self

    def __exit__(self, *_): ...
    def submit(self, function: Callable, *arguments: Any) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


def load_script_inline(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of scripts/ as a module whose pool of processes runs jobs here."""
    script = load_script(name)
    monkeypatch.setitem(sys.modules, name, script)
    monkeypatch.setattr(script, "ProcessPoolExecutor", InlinePool)
    return script
