import sys
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from conftest import VOCAB, random_tokens, seeded, tiny_cell
from memtrain.config import CellConfig
from memtrain.errors import CellContractError, MemtrainError
from memtrain.models.cells import GRUCell, LSTMCell, MLPCell, TransformerCell, build_cell
from memtrain.models.check_cell import check_cell, memory_shape

KINDS = ("transformer", "mlp", "gru", "lstm")
SHAPES = ((1, 16), (3, 24), (2, 4), (4, 8))
CASES = [
    (kind, *shape) for kind in KINDS for shape in SHAPES if kind != "lstm" or shape[0] % 2 == 0
]


def random_memory(cell: nn.Module, rows: int = 5) -> Tensor:
    return torch.randn(rows, *memory_shape(cell), generator=seeded())


@pytest.mark.parametrize(
    ("kind", "memory_tokens", "memory_dim"), CASES, ids=[f"{k}-M{m}-D{d}" for k, m, d in CASES]
)
class TestEveryCell:
    @pytest.fixture
    def cell(self, kind, memory_tokens, memory_dim) -> nn.Module:
        return tiny_cell(kind, memory_tokens=memory_tokens, memory_dim=memory_dim, layers=2)

    def test_keeps_the_contract(self, cell, memory_tokens, memory_dim):
        assert check_cell(cell, VOCAB) is cell
        assert memory_shape(cell) == (memory_tokens, memory_dim)

    def test_is_one_step_for_any_batch_size(self, cell, memory_tokens, memory_dim):
        for rows in (0, 1, 5):
            memory = torch.randn(rows, memory_tokens, memory_dim)
            assert cell(memory, random_tokens(rows)).shape == memory.shape

    def test_reads_its_token_and_its_whole_memory(self, cell, memory_tokens):
        memory, token = random_memory(cell), random_tokens(5)
        out = cell(memory, token)
        assert ((cell(memory, (token + 1) % VOCAB) - out).abs().amax((1, 2)) > 1e-4).all()
        for slot in range(memory_tokens):
            other = memory.clone()
            other[:, slot] += torch.randn(cell.memory_dim, generator=seeded(1))
            assert ((cell(other, token) - out).abs().amax((1, 2)) > 1e-4).all(), slot


@pytest.mark.parametrize("kind", KINDS)
def test_transformer_and_mlp_give_tokens_of_rms_1_and_gated_cells_do_not(kind):
    cell = tiny_cell(kind, memory_tokens=4, memory_dim=24)
    rms = cell(random_memory(cell), random_tokens(5)).square().mean(-1).sqrt()
    normalised = torch.allclose(rms, torch.ones(5, 4), atol=1e-3)
    assert normalised is (kind not in ("gru", "lstm"))


class TestTransformerCell:
    def test_memory_positions_come_out_of_full_attention_over_memory_and_token(self):
        cell = tiny_cell(memory_tokens=3, memory_dim=24)
        assert isinstance(cell, TransformerCell)
        memory, token = random_memory(cell), random_tokens(5)
        x = torch.cat([cell.from_memory(memory), cell.embedding(token)[:, None]], dim=1)
        full = cell.to_memory(cell.stack(x, queries=slice(None)))[:, :3]
        expected = full / full.square().mean(-1, keepdim=True).sqrt()
        assert_close(cell(memory, token), expected, atol=1e-4, rtol=1e-4)

    def test_a_fast_path_steps_only_without_gradients_and_where_it_applies(self):
        class Standin:
            def serves(self, memory: Tensor) -> bool:
                return len(memory) < 5

            def __call__(self, memory: Tensor, token: Tensor) -> Tensor:
                return -memory

        cell = tiny_cell()
        assert isinstance(cell, TransformerCell)
        memory, token = random_memory(cell), random_tokens(5)
        expected = cell(memory, token)
        cell.fast = Standin()
        assert_close(cell(memory[:4], token[:4]), expected[:4])
        with torch.no_grad():
            assert torch.equal(cell(memory[:4], token[:4]), -memory[:4])
            assert_close(cell(memory, token), expected)

    def test_default_size_is_that_of_the_paper(self):
        cell = build_cell(CellConfig(), 256)
        assert 8.4e6 < sum(p.numel() for p in cell.parameters()) < 8.6e6


class TestMLPCell:
    def test_equals_its_layers_written_out(self):
        cell = tiny_cell("mlp", layers=2)
        assert isinstance(cell, MLPCell)
        memory, token = random_memory(cell), random_tokens(5)
        first, second, last = (m for m in cell.mlp if isinstance(m, nn.Linear))
        assert [m.out_features for m in (first, second, last)] == [16, 16, 2 * 16]
        x = torch.cat([memory[:, 0], memory[:, 1], cell.embedding(token)], dim=1)
        x = nn.functional.gelu(x @ first.weight.T + first.bias)
        x = nn.functional.gelu(x @ second.weight.T + second.bias)
        x = (x @ last.weight.T + last.bias).reshape(5, 2, 16)
        expected = x / x.square().mean(-1, keepdim=True).sqrt()
        assert_close(cell(memory, token), expected, atol=1e-4, rtol=1e-4)


def stacked_weights(layers: nn.ModuleList) -> dict[str, Tensor]:
    """The weights of single cells under the names of nn.GRU and nn.LSTM."""
    return {
        f"{name}_l{depth}": value
        for depth, layer in enumerate(layers)
        for name, value in layer.state_dict().items()
    }


class TestGRUCell:
    def test_one_layer_equals_the_equations_written_out(self):
        cell = tiny_cell("gru", memory_tokens=1)
        assert isinstance(cell, GRUCell)
        memory, token = random_memory(cell), random_tokens(5)
        x, h = cell.embedding(token), memory[:, 0]
        weights = dict(cell.layers[0].named_parameters())
        from_input = (x @ weights["weight_ih"].T + weights["bias_ih"]).chunk(3, dim=1)
        from_state = (h @ weights["weight_hh"].T + weights["bias_hh"]).chunk(3, dim=1)
        reset = (from_input[0] + from_state[0]).sigmoid()
        update = (from_input[1] + from_state[1]).sigmoid()
        candidate = (from_input[2] + reset * from_state[2]).tanh()
        expected = (1 - update) * candidate + update * h
        assert_close(cell(memory, token)[:, 0], expected)

    def test_layers_read_the_new_state_of_the_layer_below(self):
        cell = tiny_cell("gru", memory_tokens=3)
        assert isinstance(cell, GRUCell)
        stacked = nn.GRU(16, 16, num_layers=3)
        stacked.load_state_dict(stacked_weights(cell.layers))
        memory, token = random_memory(cell), random_tokens(5)
        _, state = stacked(cell.embedding(token)[None], memory.transpose(0, 1).contiguous())
        assert_close(cell(memory, token), state.transpose(0, 1))


class TestLSTMCell:
    def test_tokens_are_h_and_c_of_each_layer_of_a_stacked_lstm(self):
        cell = tiny_cell("lstm", memory_tokens=6)
        assert isinstance(cell, LSTMCell)
        stacked = nn.LSTM(16, 16, num_layers=3)
        stacked.load_state_dict(stacked_weights(cell.layers))
        memory, token = random_memory(cell), random_tokens(5)
        h, c = (memory[:, at::2].transpose(0, 1).contiguous() for at in (0, 1))
        _, (h, c) = stacked(cell.embedding(token)[None], (h, c))
        found = cell(memory, token)
        assert_close(found[:, 0::2], h.transpose(0, 1))
        assert_close(found[:, 1::2], c.transpose(0, 1))

    def test_keeps_full_precision_under_autocast(self):
        cell = tiny_cell("lstm", memory_tokens=2)
        memory, token = random_memory(cell), random_tokens(5)
        with torch.autocast("cpu", torch.bfloat16):
            found = cell(memory.bfloat16().float(), token)
        assert found.dtype == torch.float32
        assert torch.equal(found, cell(memory.bfloat16().float(), token))

    def test_an_odd_number_of_tokens_is_refused(self):
        with pytest.raises(MemtrainError, match="memory_tokens=3: must be even.*set it to 4"):
            tiny_cell("lstm", memory_tokens=3)


# ------------------------------------------------------------------------------ broken cells


class Sound(nn.Module):
    """Keeps the contract; the cells below break one rule each."""

    memory_tokens, memory_dim = 2, 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, memory, token):
        return self.linear(memory + self.embedding(token)[:, None])


class NoModule:
    memory_tokens, memory_dim = 2, 4

    def __call__(self, memory, token):
        return memory


class NoMemoryDim(Sound):
    memory_dim = None  # type: ignore[assignment]


class ZeroMemoryTokens(Sound):
    memory_tokens = 0


class FractionalMemoryDim(Sound):
    memory_dim = 4.0  # type: ignore[assignment]


class WrongShape(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token)[:, :1]


class TupleOutput(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token), token


class WholeNumbers(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token).long()


class Stateful(Sound):
    calls = 0

    def forward(self, memory, token):
        self.calls += 1
        return super().forward(memory, token) * self.calls


class WritesToMemory(Sound):
    def forward(self, memory, token):
        return super().forward(memory.mul_(0.5), token)


class Averages(Sound):
    """Innocent in eval mode, mixing rows in training."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(self.memory_tokens)

    def forward(self, memory, token):
        return self.norm(super().forward(memory, token))


class NotANumber(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token) * float("nan")


class MixesRows(Sound):
    def forward(self, memory, token):
        out = super().forward(memory, token)
        return out - out.mean(0)


class OnlyForOneBatchSize(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token).reshape(-1)[:24].reshape(3, 2, 4)


class NotFiniteFromZero(Sound):
    def forward(self, memory, token):
        return super().forward(memory / memory.norm(dim=-1, keepdim=True), token)


class NoGradientAtAll(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token).detach()


class NoGradientToMemory(Sound):
    def forward(self, memory, token):
        return super().forward(memory.detach(), token)


class IgnoresMemory(Sound):
    def forward(self, memory, token):
        return super().forward(0 * memory, token)


class NoParameters(nn.Module):
    memory_tokens, memory_dim = 2, 4

    def forward(self, memory, token):
        return memory.tanh()


class UnusedParameter(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(3, 3, bias=False)


class Raises(Sound):
    def forward(self, memory, token):
        raise RuntimeError("sizes do not match\nand a second line")


class RaisesWithoutWords(Sound):
    def forward(self, memory, token):
        raise AssertionError


class ReturnsDouble(Sound):
    def forward(self, memory, token):
        return super().forward(memory, token).double()


class DoubleParameters(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.double()


class Swapped(Sound):
    def forward(self, token, memory):
        return super().forward(memory, token)


class FewRows(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB - 1, 4)


BROKEN = {
    ReturnsDouble: "must return torch.float32 for a memory of torch.float32, not torch.float64",
    DoubleParameters: "must return torch.float32 for a memory of torch.float32, not torch.float64; "
    "call cell.float()",
    Swapped: "; are memory and token swapped? It is forward(memory, token)",
    FewRows: "; embedding has 6 rows, the task's vocabulary 7 tokens",
    NoModule: "a cell must be a torch.nn.Module",
    NoMemoryDim: "memory_dim=None: the cell must state it",
    ZeroMemoryTokens: "memory_tokens=0: the cell must state it as a whole number above 0",
    FractionalMemoryDim: "memory_dim=4.0: the cell must state it as a whole number",
    WrongShape: "forward must return the shape it got, (3, 2, 4), not (3, 1, 4)",
    TupleOutput: "forward must return one floating-point tensor, not tuple",
    WholeNumbers: "forward must return one floating-point tensor",
    Stateful: "keep no state between calls",
    WritesToMemory: "forward must not write to the memory it got",
    MixesRows: "rows must not mix",
    Averages: "BatchNorm1d",
    NotANumber: "must return finite numbers",
    OnlyForOneBatchSize: "forward(memory (1, 2, 4), token (1,)) raised RuntimeError",
    NotFiniteFromZero: "the zero memory must be a valid start",
    NoGradientAtAll: "forward must be differentiable",
    NoGradientToMemory: "the new memory must depend on the old one",
    IgnoresMemory: "the new memory must depend on the old one",
    NoParameters: "a cell must have parameters to train",
    UnusedParameter: "every parameter must be used, but ['forgotten.weight'] is not",
    Raises: "forward(memory (3, 2, 4), token (3,)) raised RuntimeError: sizes do not match",
    RaisesWithoutWords: "forward(memory (3, 2, 4), token (3,)) raised AssertionError",
}


class TestCheckCell:
    def test_a_valid_user_cell_is_accepted(self):
        cell = Sound()
        assert check_cell(cell, VOCAB) is cell

    def test_frozen_parameters_may_stay_unused(self):
        cell = UnusedParameter()
        cell.forgotten.requires_grad_(False)
        assert check_cell(cell, VOCAB) is cell

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda cell: cell.__name__)
    def test_a_broken_cell_is_refused_with_the_rule_it_breaks(self, broken):
        with pytest.raises(CellContractError) as caught:
            check_cell(broken(), VOCAB)
        message = str(caught.value)
        assert message.startswith(f"{broken.__name__}: ")
        assert BROKEN[broken] in message
        assert "\n" not in message

    @pytest.mark.parametrize(
        ("cell", "message"),
        [
            (Sound, "Sound: is a class; pass an instance, cell=Sound(...)"),
            ("gru", "config.cell.kind; memtrain.make_cell makes one"),
            (nn.GRUCell(8, 8), "GRUCell: memory_tokens and memory_dim missing; a cell states"),
            (nn.GRUCell(8, 8), "forward(memory (B, M, D), token (B,)) -> memory (B, M, D)"),
        ],
        ids=["class", "text", "GRUCell", "forward"],
    )
    def test_objects_that_are_not_cells_are_refused_with_a_remedy(self, cell, message):
        with pytest.raises(CellContractError) as caught:
            check_cell(cell, VOCAB)
        assert message in str(caught.value)

    def test_parameters_in_double_are_named_where_the_step_fails(self):
        cell = Sound()
        cell.linear.double()
        cell.embedding.double()
        cell.forward = lambda memory, token: cell.linear(memory)  # type: ignore[method-assign]
        with pytest.raises(CellContractError, match="parameters are torch.float64.*cell.float()"):
            check_cell(cell, VOCAB)

    @pytest.mark.parametrize("cell_class", [Sound, MixesRows])
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_the_check_restores_mode_and_leaves_no_gradients(self, cell_class, training):
        cell = cell_class().train(training)
        before = {name: value.clone() for name, value in cell.state_dict().items()}
        try:
            check_cell(cell, VOCAB)
        except CellContractError:
            assert cell_class is MixesRows
        assert cell.training is training
        assert all(parameter.grad is None for parameter in cell.parameters())
        assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())

    def test_dropout_is_allowed(self):
        cell = Sound()
        cell.linear = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))  # type: ignore[assignment]
        assert check_cell(cell, VOCAB) is cell

    def test_draws_nothing_from_the_global_generator(self):
        cell = Sound()
        before = torch.get_rng_state()
        check_cell(cell, VOCAB)
        assert torch.equal(torch.get_rng_state(), before)


# ----------------------------------------------------------------------- cells of the user's

USER_CELL = """
    import torch
    from torch import nn


    class Leaky(nn.Module):
        memory_tokens = 1

        def __init__(self, vocab_size, width=4, bias=True):
            super().__init__()
            self.memory_dim = width
            self.embedding = nn.Embedding(vocab_size, width)
            self.mix = nn.Linear(width, width, bias=bias)

        def forward(self, memory, token):
            return torch.tanh(self.mix(memory) + self.embedding(token)[:, None])


    class Unmade(Leaky):
        def __init__(self, vocab_size):
            raise OSError("no weights file")


    class Broken(Leaky):
        def forward(self, memory, token):
            return memory[:1]


    def leaky(vocab_size):
        return Leaky(vocab_size)
"""


class TestBuildCell:
    @pytest.fixture(autouse=True)
    def user_folder(self, tmp_path, monkeypatch):
        """The current folder holds my_lab/cells.py; imports of it end with the test."""
        package = tmp_path / "my_lab"
        package.mkdir()
        (package / "cells.py").write_text(dedent(USER_CELL))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
            del sys.modules[name]

    @pytest.mark.parametrize("kind", KINDS)
    def test_built_in_cells_are_named_by_their_kind(self, kind):
        cell = build_cell(CellConfig(kind=kind, memory_tokens=2, memory_dim=4), VOCAB)
        assert type(cell).__name__.lower() == f"{kind}cell"

    def test_a_class_in_the_current_folder_is_found_and_keeps_its_own_shape(self):
        cell = build_cell(CellConfig(kind="my_lab.cells:Leaky", memory_dim=99), VOCAB)
        assert type(cell).__name__ == "Leaky"
        assert memory_shape(cell) == (1, 4)
        assert cell.embedding.num_embeddings == VOCAB  # type: ignore[union-attr]

    def test_options_go_to_the_class(self):
        config = CellConfig(kind="my_lab.cells:Leaky", options={"width": 6, "bias": False})
        cell = build_cell(config, VOCAB)
        assert cell.memory_dim == 6
        assert cell.mix.bias is None  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("kind", "options", "parts"),
        [
            (
                "my_lab.cels:Leaky",
                {},
                ["cell.kind=my_lab.cels:Leaky", "No module named", "was searched too"],
            ),
            ("my_lab.cells:Leeky", {}, ["no class Leeky", "'Leaky'", "'Broken'"]),
            ("my_lab.cells:leaky", {}, ["no class leaky"]),
            ("my_lab.cells:Leaky", {"widht": 6}, ["widht", "Class(vocab_size=..., **options)"]),
            ("my_lab.cells:Leaky", {"vocab_size": 6}, ["vocab_size", "Class(vocab_size=..."]),
            ("my_lab.cells:Unmade", {}, ["its constructor raised OSError: no weights file"]),
            ("my_lab.cells:Broken", {}, ["Broken: forward must return the shape it got"]),
        ],
        ids=["module", "class", "function", "option", "vocab_size", "raises", "contract"],
    )
    def test_unbuildable_cells_are_refused_in_one_line(self, kind, options, parts):
        with pytest.raises(MemtrainError) as caught:
            build_cell(CellConfig(kind=kind, options=options), VOCAB)
        message = str(caught.value)
        assert all(part in message for part in parts), message
        assert "\n" not in message
