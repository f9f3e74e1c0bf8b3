"""Mistakes in Python: each raises one line that names the argument, its value and the remedy."""

# ruff: noqa: E501 (a mistake per line)
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memtrain
from conftest import TINY, tiny_cell, tiny_rnn, tiny_teacher
from memtrain.config.data import Retrieval
from memtrain.data.task import build_task
from memtrain.generation.memory import MemoryCard

SIZES: dict[str, Any] = dict(width=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
TOKENS = torch.tensor([[3, 0, 5, 1], [2, 6, 4, 0]])
VALUES = memtrain.Values(features=3, targets=2)
MEMORY = torch.zeros(2, 4, 2, 16)
"""Two rollouts of four memories of 2 x 16, the shape of the tiny models."""


def smt(**settings: Any) -> memtrain.SMT:
    return memtrain.SMT(tiny_teacher(), tiny_rnn(), **settings)


def rnn_of(cell: Any) -> Any:
    return memtrain.RNN(cell, vocab_size=7, **SIZES)


class Wider(nn.Module):
    """Returns a memory of another shape."""

    memory_tokens, memory_dim = 2, 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 17)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return nn.functional.pad(memory, (0, 1)) + self.embedding(token)[:, None]


def attention_cell() -> nn.Module:
    return memtrain.make_cell("attention", vocab_size=7, width=16, heads=2, head_dim=8, layers=1)


class Table:
    """Has three rows, and two columns by name, as a DataFrame."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: Any) -> list[float]:
        return {0: [1.0, 2.0, 3.0], 1: [4.0, 5.0, 6.0]}[name]


def other_readout() -> memtrain.RNN:
    sizes: dict[str, Any] = SIZES | {"width": 32}
    return memtrain.RNN(tiny_cell(), vocab_size=7, **sizes)


def memory() -> memtrain.Memory:
    card = MemoryCard(model="0", name="tiny", tokens=1, kind="text", source="a text")
    return memtrain.Memory(torch.zeros(2, 4), card)


def value_rnn() -> memtrain.RNN:
    cell = memtrain.make_cell("gru", values=VALUES, memory_tokens=1, memory_dim=16)
    return memtrain.RNN(cell, values=VALUES, **SIZES)


def touched(path: Path) -> Path:
    path.touch()
    return path


def run_of(folder: Path) -> memtrain.Run:
    return memtrain.Run.create(TINY, folder / "run")


Case = tuple[str, Callable[[Path], Any], str]
CASES: list[Case] = [
    # ---------------------------------------------------------------- those of the trial
    ("run without a folder", lambda _: memtrain.Run("runs/x"), r"config='runs/x': .*Run.open\("),  # type: ignore
    ("recipe's name for a config", lambda _: memtrain.Run.create("digits"), r"recipe\('digits'\)"),  # type: ignore
    ("a class for a cell", lambda p: memtrain.Run.create(TINY, p / "r", cell=Wider), r"cell=Wider: is a class; pass an object, Wider\("),  # type: ignore
    ("torch's cell", lambda p: memtrain.Run.create(TINY, p / "r", cell=nn.GRUCell(8, 8)), "GRUCell: memory_tokens and memory_dim missing; a cell states .*memtrain.wrap"),
    ("a name for a cell", lambda p: memtrain.Run.create(TINY, p / "r", cell="gru"), "cell='gru': .*make_cell"),  # type: ignore
    ("steps as text", lambda _: memtrain.SMTConfig(steps="100"), "steps='100': must be a whole number"),  # type: ignore
    ("steps as a float", lambda _: memtrain.SMTConfig(steps=10.0), "steps=10.0: must be a whole number"),  # type: ignore
    ("a run's folder twice", lambda p: (run_of(p), run_of(p)), r"overwrite=True"),
    ("a stage that is not there", lambda p: run_of(p).train(until="foo"), "until='foo': this run's stages are smt, dmt, bptt"),
    ("a name to generate from", lambda _: memtrain.generate("mnist-small"), r"model='mnist-small': .*load_pretrained\('mnist-small'\)"),
    ("a text to a model of images", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), prompt="a"), "prompt='a': this model generates images; complete one with its first tokens, an array"),
    ("a token as a number", lambda _: tiny_rnn().step(torch.zeros(1, 2, 16), 3), r"token=3: must be a tensor .*torch.tensor\(\[3\]\)"),  # type: ignore
    ("a token outside", lambda _: tiny_rnn().step(torch.zeros(1, 2, 16), torch.tensor([99])), r"token: contains 99, outside the vocabulary 0..6"),
    ("a dict as a config", lambda _: memtrain.to_json({"a": 1}), "must be a RunConfig"),  # type: ignore
    ("a path as JSON", lambda _: memtrain.from_json("runs/c/config.json"), r"runs/c/config.json.*read_text"),
    # ------------------------------------------------------------------------- tokens
    ("a list for tokens", lambda _: smt()([[3, 0], [5, 1]]), r"tokens=\[\[3, 0\], \[5, 1\]\]: must be a tensor .*torch.tensor"),
    ("an array for tokens", lambda _: smt()(np.zeros((2, 3), np.int64)), "tokens=.*must be a tensor of whole numbers, such as torch.tensor"),
    ("floats for tokens", lambda _: smt()(TOKENS.float()), r"tokens: must be int64, not torch.float32; tokens.long\(\)"),
    ("one sequence without a batch", lambda _: smt()(TOKENS[0]), r"tokens: must have shape \(B, T\), not \(4,\); such as torch.tensor"),
    ("no sequences", lambda _: smt()(TOKENS[:0]), r"tokens: must have shape \(B, T\), not \(0, 4\)"),
    ("a token beyond the vocabulary", lambda _: smt()(TOKENS + 3), r"tokens: contains 8, outside the vocabulary 0..6"),
    ("tokens elsewhere", lambda _: smt()(TOKENS.to("meta")), r"tokens: must be on cpu, .*not on meta; tokens.to\('cpu'\)"),
    ("sequences of one token", lambda _: smt()(TOKENS[:, :1]), r"tokens=\(2, 1\): must have at least 2 .*pass targets"),
    ("windows too short for a stream", lambda _: smt(stream=True)(TOKENS), r"tokens=\(2, 4\): .*at least 72 tokens.*stream=True"),
    ("sequences too short for a segment", lambda _: smt(dynamics_steps=5)(TOKENS), r"dynamics_steps=5: sequences must have at least 5 tokens, and tokens are \(2, 4\); lower it"),
    ("too short without the first step", lambda _: smt(dynamics_steps=4, learn_start=False, timesteps=0)(TOKENS), r"dynamics_steps=4: sequences must have at least 5 tokens"),
    ("tokens beyond it in rnn()", lambda _: tiny_rnn()(TOKENS + 3), r"tokens: contains 8, outside the vocabulary 0..6"),
    # ------------------------------------------------------------------------- targets
    ("targets of another length", lambda _: smt()(TOKENS, targets=TOKENS[:, 1:]), r"targets=\(2, 3\): .*shape of tokens, \(2, 4\), with -100 where"),
    ("targets by position", lambda _: smt()(TOKENS, TOKENS), r"generator=Tensor: must be a torch.Generator.*targets=..."),  # type: ignore
    ("targets of floats", lambda _: smt()(TOKENS, targets=TOKENS.float()), r"targets=torch.float32: must be int64; pass targets.long\(\)"),
    ("targets outside", lambda _: smt()(TOKENS, targets=TOKENS + 3), r"targets=8: must be in 0..6, or -100 where"),
    ("targets of -1 for none", lambda _: smt()(TOKENS, targets=TOKENS * 0 - 1), r"targets=-1: must be in 0..6, or -100 where"),
    ("no target at all", lambda _: smt()(TOKENS, targets=TOKENS * 0 - 100), r"targets=-100 everywhere: at least one must be in 0..6"),
    ("a batch and targets", lambda _: smt()(memtrain.Batch(TOKENS, TOKENS), targets=TOKENS), "targets: must be left out; the Batch has its own"),
    ("a seed for a generator", lambda _: smt()(TOKENS, 0), "generator=int: must be a torch.Generator, or left out"),  # type: ignore
    # ------------------------------------------------------------------------- settings
    ("a negative future", lambda _: smt(future_length=-1), "future_length=-1: must be at least 1; the paper uses 64"),
    ("a misspelt setting", lambda _: smt(future_lenght=8), "future_lenght=8: SMTConfig has no such field; did you mean future_length"),
    ("the optimizer's setting", lambda _: smt(learning_rate=1e-3), "learning_rate=0.001: must be left out; .*optimizer are yours"),
    ("another objective's config", lambda _: memtrain.DMT(tiny_teacher(), tiny_rnn(), memtrain.SMTConfig()), "config=SMTConfig: must be a DMTConfig; or leave it out"),  # type: ignore
    ("token_weight with windows", lambda _: smt(token_weight=0.1), 'token_weight=0.1: must be 0 .*encoder="causal"'),
    # ------------------------------------------------------------------------- models
    ("rnn and teacher swapped", lambda _: memtrain.SMT(tiny_rnn(), tiny_teacher()), r"teacher=RNN: must be a memtrain.Teacher; it is SMT\(teacher, rnn\)"),  # type: ignore
    ("a cell for an rnn", lambda _: memtrain.BPTT(tiny_cell()), r"rnn=TransformerCell: must be a memtrain.RNN; it is BPTT\(rnn\)"),  # type: ignore
    ("memories of two shapes", lambda _: memtrain.SMT(tiny_teacher(memory_tokens=3), tiny_rnn()), r"memory is \(3, 16\), that of the cell \(2, 16\).*memory_tokens=2"),
    ("another readout", lambda _: memtrain.SMT(tiny_teacher(), other_readout()), r"rnn: its readout differs .*RNN\(cell, teacher\)"),
    ("a cell of another memory", lambda _: rnn_of(Wider()), r"Wider: forward must return the shape it got, \(3, 2, 16\), not \(3, 2, 17\)"),
    ("a cell with too few tokens", lambda _: memtrain.RNN(tiny_cell(), vocab_size=9, **SIZES), "embedding has 7 rows, the task's vocabulary 9 tokens"),
    ("no vocabulary", lambda _: memtrain.RNN(tiny_cell()), "vocab_size=0: must be a whole number above 0"),
    ("a teacher's vocabulary first", lambda _: memtrain.Teacher(9), "config=int: must be a TeacherConfig; or leave it out"),  # type: ignore
    ("a teacher's misspelt size", lambda _: memtrain.Teacher(vocab_size=9, layers=2), "layers=2: TeacherConfig has no such field; did you mean"),
    ("a linear readout", lambda _: memtrain.RNN(tiny_cell(), nn.Linear(16, 7)), "readout=Linear: must be a memtrain.Decoder, or the memtrain.Teacher"),  # type: ignore
    ("a readout of another width", lambda _: memtrain.RNN(tiny_cell(), memtrain.Decoder(vocab_size=7, memory_dim=8, **SIZES)), r"readout: reads memory tokens of width 8, those of the cell have 16; Decoder\(memory_dim=16"),
    ("a teacher of an attention cell", lambda _: memtrain.RNN(attention_cell(), tiny_teacher()), r"readout=<Teacher.*must be left out; an attention cell .* BPTT alone: RNN\(cell, vocab_size=7\)"),
    ("another vocabulary of an attention cell", lambda _: memtrain.RNN(attention_cell(), vocab_size=9), "vocab_size=9: the cell reads tokens, vocab_size=7"),
    ("weights of 16 bits", lambda _: tiny_rnn().bfloat16()(TOKENS), r"rnn: its weights are torch.bfloat16, .*; take rnn.float\(\) under torch.autocast\('cpu', torch.bfloat16\)"),
    ("a step with weights of 16 bits", lambda _: rnn_of(memtrain.make_cell("gru", vocab_size=7, memory_tokens=1, memory_dim=16)).half().step(torch.zeros(1, 1, 16), TOKENS[0, :1]), "rnn: its weights are torch.float16"),
    ("a list to unroll", lambda _: tiny_rnn().unroll([[3, 0]]), r"inputs=\[\[3, 0\]\]: must be a tensor of whole numbers"),  # type: ignore
    ("a token beyond the vocabulary to read", lambda _: tiny_rnn().read(TOKENS + 3), "inputs: contains 8, outside the vocabulary 0..6"),
    ("a memory of other rows", lambda _: tiny_rnn().unroll(TOKENS, torch.zeros(1, 2, 16)), r"memory: must be a tensor of shape \(2, 2, 16\), not \(1, 2, 16\)"),
    ("a size that a GRU has not", lambda _: memtrain.make_cell("gru", vocab_size=9, layers=4), "layers=4: must be left out with cell.kind=gru"),
    ("a cell of no known kind", lambda _: memtrain.make_cell("gruu", vocab_size=9), "kind='gruu': did you mean gru"),
    ("a memory of another shape", lambda _: tiny_rnn().step(torch.zeros(1, 3, 16), torch.tensor([1])), r"memory: must be a tensor of shape \(B, 2, 16\), not \(1, 3, 16\); rnn.empty_memory"),
    # ------------------------------------------------------------------------- numbers
    ("a likelihood by its other name", lambda _: memtrain.Values(features=1, likelihood="normal"), "likelihood='normal': must be one of gaussian, quantile, student-t"),  # type: ignore
    ("a number of features for values", lambda _: memtrain.make_cell("gru", values=3), r"values=3: must be a memtrain.Values, such as Values\(features=4, targets=3\)"),  # type: ignore
    ("tokens and numbers", lambda _: memtrain.Teacher(vocab_size=3, values=VALUES), "vocab_size=3: must be left out; values="),
    ("tokens for numbers", lambda _: value_rnn()(TOKENS), r"tokens=torch.int64: must be a tensor of floats, \(B, T, 3\); this model reads numbers"),
    ("numbers for tokens", lambda _: tiny_rnn()(torch.randn(2, 4)), r"tokens: must be int64, not torch.float32; tokens.long\(\)"),
    ("one number too few", lambda _: value_rnn()(torch.zeros(2, 5, 2)), r"must have shape \(B, T, 3\), not \(2, 5, 2\); an input has 2 target numbers and 1 known ones"),
    ("infinite numbers", lambda _: value_rnn()(torch.full((2, 5, 3), torch.inf)), "contains infinity; numbers must be finite, or NaN where they are missing"),
    ("targets of one axis too few", lambda _: memtrain.BPTT(value_rnn())(torch.zeros(2, 5, 3), targets=torch.zeros(2, 5)), r"targets=\(2, 5\): must be a tensor of shape \(2, 5, 2\), with NaN"),  # type: ignore
    ("outputs for another likelihood", lambda _: memtrain.losses.value_loss(torch.zeros(4, 6), torch.zeros(4, 2)), r"outputs=\(4, 6\): must be \(4, 4\): 2 parameters of gaussian"),
    # ------------------------------------------------------------------------- losses
    ("memories of other shapes", lambda _: memtrain.losses.dynamics_loss(MEMORY, MEMORY[:, :-1]), r"predicted=\(2, 4, 2, 16\): must have the shape of memory, \(2, 3, 2, 16\)"),
    ("weights of another shape", lambda _: memtrain.losses.dynamics_loss(MEMORY, MEMORY, torch.ones(4)), r"weight=\(4,\): must have one number per memory, \(2, 4\)"),
    ("targets beyond the classes", lambda _: memtrain.losses.decode_loss(torch.zeros(2, 4), torch.tensor([1, 4])), r"targets=4: must be 0..3, the classes of logits, or -100"),
    ("targets of two axes", lambda _: memtrain.losses.decode_loss(torch.zeros(2, 4), torch.zeros(2, 1)), r"targets=\(2, 1\): must have the shape of logits without the last axis, \(2,\)"),
    ("memories without time", lambda _: memtrain.losses.rollout_drift(MEMORY[:, 0], MEMORY[:, 0]), r"memories=\(2, 2, 16\): must be \(B, T, M, D\), as rnn.unroll"),
    ("a list of logits", lambda _: memtrain.losses.decode_loss([[0.0, 1.0]], [1]), r"logits=list: must be a torch.Tensor; torch.tensor\("),  # type: ignore
    ("one sample", lambda _: memtrain.losses.uniformity_loss(MEMORY, samples=1), "samples=1: must be at least 2; the loss compares pairs"),
    ("samples as a float", lambda _: memtrain.losses.uniformity_loss(MEMORY, samples=4.5), "samples=4.5: must be a whole number"),  # type: ignore
    ("a list of weights", lambda _: memtrain.losses.dynamics_loss(MEMORY, MEMORY, [1.0, 2.0]), r"weight=list: must have one number per memory, \(2, 4\)"),  # type: ignore
    ("a part without its weight", lambda _: memtrain.losses.total_loss({"decode": torch.tensor(1.0)}), r"parts: decode is a Tensor; must be \(weight, loss\), as \{'decode': \(1.0, loss\)\}"),  # type: ignore
    ("a number for a likelihood", lambda _: memtrain.losses.value_loss(MEMORY, MEMORY, 3), "likelihood=3: must be one of gaussian"),  # type: ignore
    # ------------------------------------------------------------------------- evaluate, generate
    ("sequences as text", lambda p: run_of(p).evaluate("4"), "sequences='4': must be a whole number"),  # type: ignore
    ("half a sequence", lambda _: memtrain.evaluate(build_task(Retrieval(vocab_size=7)), tiny_rnn(), sequences=2.5), "sequences=2.5: must be a whole number"),  # type: ignore
    ("a length as a float", lambda p: run_of(p).evaluate(4, length=7.5), "length=7.5: must be a whole number"),  # type: ignore
    ("a seed as text", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), seed="a"), "seed='a': must be a whole number"),  # type: ignore
    ("a temperature as text", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), temperature="a"), "temperature='a': must be a number"),  # type: ignore
    ("tokens to keep as a float", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), top_k=2.5), "top_k=2.5: must be a whole number"),  # type: ignore
    ("a text to sample after", lambda _: memtrain.sample(tiny_rnn(), "ab", 3, torch.Generator()), "prompt='ab': must be a tensor of whole numbers"),  # type: ignore
    ("a prompt beyond the vocabulary", lambda _: memtrain.sample(tiny_rnn(), TOKENS + 3, 3, torch.Generator()), "prompt: contains 8, outside the vocabulary 0..6"),
    ("a seed to sample with", lambda _: memtrain.sample(tiny_rnn(), TOKENS, 3, 0), r"generator=int: must be a torch.Generator; torch.Generator\(\).manual_seed\(0\)"),  # type: ignore
    ("a misspelt temperature", lambda _: memtrain.sample(tiny_rnn(), TOKENS, 3, torch.Generator(), temprature=1.0), "temprature=1.0: did you mean temperature"),
    ("a table to forecast", lambda _: memtrain.forecast(value_rnn(), Table(), 2), r"inputs=Table: must be numbers of shape \(B, P, 3\)"),
    ("a file for a run's folder", lambda p: memtrain.Run.create(TINY, touched(p / "a.txt")), "a.txt: is a file; a run is a folder, name another"),
    ("a number for a recipe", lambda _: memtrain.recipe(3), "recipe 3: must be one of"),  # type: ignore
    ("one state's size without a list", lambda _: memtrain.wrap(nn.GRUCell(8, 8), vocab_size=7, state_sizes=8), r"state_sizes=8: must be the widths of all states, such as \(8,\)"),  # type: ignore
    ("a run to evaluate()", lambda p: memtrain.evaluate(run_of(p), None), r"task=Run: must be a memtrain.Task; .*run.evaluate\(\)"),  # type: ignore
    ("another task's vocabulary", lambda _: memtrain.evaluate(build_task(Retrieval(vocab_size=9)), tiny_rnn()), "task: its vocab_size=9, that of the rnn is 7; they must be equal"),
    ("no sequences to evaluate", lambda p: run_of(p).evaluate(0), "sequences=0: must be at least 1"),
    ("a bare module to generate from", lambda _: memtrain.generate(nn.Linear(2, 2)), "model=Linear: must be a Run, or the result of load_pretrained or load_rnn"),
    ("tokens from a task of answers", lambda p: memtrain.generate(run_of(p)), r"model=Run: its task asks for answers .*model.rnn\(tokens\)"),
    ("a prompt of floats", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), prompt=np.zeros(3)), "prompt: float64 of shape .*must be a text, or whole numbers"),
    ("a path for a memory", lambda _: memtrain.generate(memtrain.load_pretrained("mnist-small"), memory="a.mem"), r"memory=str: must be a memtrain.Memory; memtrain.Memory.load\(path\)"),  # type: ignore
    ("a name to read with", lambda _: memtrain.remember("mnist-small", "a"), r"model='mnist-small': .*load_pretrained\('mnist-small'\)"),
    ("a list of tokens to read", lambda _: memtrain.remember(memtrain.load_pretrained("mnist-small"), [3, 1]), r"given=int: must be a text \(str\), a file .* or tokens \(numpy.array\)"),  # type: ignore
    ("values to average", lambda _: memtrain.Memory.average([torch.zeros(2)]), "memories=Tensor: must be a memtrain.Memory"),  # type: ignore
    ("a number to shift by", lambda _: memory().shifted(2.0), r"by=float: must be a tensor of shape \(2, 4\)"),  # type: ignore
    ("a tensor to compare", lambda _: memory().distance(memory().values), "other=Tensor: must be a memtrain.Memory"),  # type: ignore
    ("a plot before training", lambda p: run_of(p).plot(), r"has no metrics to plot yet; call run.train\(\) first"),
    ("an untrained run to load", lambda p: memtrain.load_rnn(run_of(p).folder), "has no checkpoint yet"),
]  # fmt: skip


def answer(mistake: Callable[[Path], Any]) -> str:
    """The message of a mistake, in a folder of its own."""
    with TemporaryDirectory() as folder:
        try:
            mistake(Path(folder))
        except memtrain.MemtrainError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__} (not MemtrainError): {error}"
    return "silent"


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Every message, from a process without the type checker of these tests, as users have it."""
    here = [sys.executable, __file__]
    done = subprocess.run(here, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_mistake_is_answered_in_one_line(case: Case, answers: dict[str, str]):
    name, _, pattern = case
    message = answers[name]
    assert re.search(pattern, message), message
    assert "\n" not in message and len(message) < 400
    assert " --" not in message  # options are for a shell


def test_the_optimizer_gets_parameters_only_where_some_are_trained():
    objective = smt()
    found = {id(p) for p in objective.trained_parameters()}
    trained = [*objective.teacher.parameters(), *objective.rnn.cell.parameters()]
    assert found == {id(p) for p in trained}
    objective.requires_grad_(False)
    with pytest.raises(memtrain.MemtrainError, match="requires_grad=False for all"):
        objective.trained_parameters()


def test_the_optimizer_gets_a_weight_that_two_modules_share_once():
    teacher, rnn = tiny_teacher(), tiny_rnn()
    cell: Any = rnn.cell
    cell.embedding.weight = rnn.readout.head.weight
    found = memtrain.DMT(teacher, rnn).trained_parameters()
    assert len(found) == len(set(found)) == len([*rnn.parameters()])


def test_configs_in_messages_fit_a_line():
    assert "\n" not in repr(TINY) and len(repr(replace(TINY, name="n"))) < 120
    assert json.loads(memtrain.to_json(TINY))["name"] == "tiny"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: answer(mistake) for name, mistake, _ in CASES}))
