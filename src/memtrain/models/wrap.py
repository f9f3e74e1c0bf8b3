"""Published recurrent cells, (input, states) -> states, as cells of memtrain.

`wrap` finds out how a cell is called by calling it with random rows: the number and the sizes of
its states, how they are passed, and whether an output is returned beside them.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.config import CellConfig
from memtrain.config.validation import preserve_rng_state
from memtrain.errors import CellContractError, describe_error
from memtrain.models.layers import evaluation_mode, make_embedding
from memtrain.shapes import Token, Values, space_of

ROWS = 7
"""Rows of a probe: more than a cell has states, so that a matrix is not taken for a tuple."""
SMALLEST_TOKEN = 8
"""The narrowest memory tokens that states of different sizes are divided into."""
INPUT_SIZES = ("input_size", "in_features", "input_dim", "sensory_size")
STATE_SIZES = ("hidden_size", "state_size", "hidden_dim", "units")
"""Names of these sizes, as attributes and as arguments of constructors."""
TIME_NAMES = ("t", "ts", "dt", "delta_t", "time", "timespan", "timespans", "elapsed_time")
"""Arguments of cells in continuous time; 1 is passed unless there is a default."""
STATE_NAMES = ("h", "hx", "hidden", "hidden_state", "state", "states", "memory")
"""Arguments that are states; if the first is one of them, the input is last."""
NEEDED = "a cell takes one step, forward(input (B, I), state or tuple of states) -> state(s)"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a cell is called."""

    sizes: tuple[int, ...]
    """Widths of the states."""
    passed: str
    """The states are passed as one: tensor, tuple, list; or as separate arguments."""
    state_first: bool
    time: tuple[str, ...]
    """Required arguments that take the time since the last step, 1."""

    def step(self, cell: nn.Module, x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
        """The new states."""
        one = {"tensor": states[0], "tuple": tuple(states), "list": [*states]}
        given: list[Any] = [*states] if self.passed == "arguments" else [one[self.passed]]
        arguments = [*given, x] if self.state_first else [x, *given]
        result = cell(*arguments, **dict.fromkeys(self.time, 1.0))
        return _states_of(result, len(self.sizes))


def _states_of(result: Any, count: int) -> list[Any]:
    """The states of a cell's result: the result, its last part, or its last tensors."""
    if not isinstance(result, (tuple, list)):
        return [result]
    if result and isinstance(result[-1], (tuple, list)):
        return [*result[-1]]
    return [*result][-count:]


class WrappedCell(nn.Module):
    """A recurrent cell whose states are the memory, one after another. Made by `wrap`.

    States of one size are one memory token each. The output is not normalized, which would undo the
    gates' residual path. Autocast is off, because a small change of a state would be lost to
    rounding. `embedding` makes the cell's inputs (B, I) from tokens or numbers.
    """

    def __init__(self, cell: nn.Module, embedding: nn.Module, form: _Form) -> None:
        super().__init__()
        self.memory_dim = math.gcd(*form.sizes)
        self.memory_tokens = sum(form.sizes) // self.memory_dim
        self.embedding = embedding
        self.cell = cell
        self._form = form

    def forward(self, memory: Float[Tensor, "B M D"], token: Token) -> Float[Tensor, "B M D"]:
        with torch.autocast(memory.device.type, enabled=False):
            x = self.embedding(token)
            states = memory.to(x.dtype).flatten(1).split(self._form.sizes, dim=1)
            new = torch.cat(self._form.step(self.cell, x, states), dim=1)
        return new.unflatten(1, (self.memory_tokens, self.memory_dim))

    def extra_repr(self) -> str:
        form = self._form
        return f"states={form.sizes}, passed={form.passed!r}, state_first={form.state_first}"


def wrap(
    cell: object,
    vocab_size: int = 0,
    *,
    values: Values | None = None,
    input_size: int | None = None,
    state_sizes: Sequence[int] | None = None,
) -> WrappedCell:
    """A cell of memtrain from any recurrent cell (input, states) -> states or (output, states).

    The cell becomes a part of the result, with an embedding of tokens or numbers before it. An
    output beside the states is not used, and parameters on which no state depends are frozen. Cells
    in continuous time take steps of length 1.

    Args:
        cell: such as torch.nn.LSTMCell(64, 64). Its states are vectors per row, (B, H).
        vocab_size: tokens of the task, if it has tokens.
        values: what the task's sequences are, if they are numbers.
        input_size: of the cell; by default its attribute input_size or in_features.
        state_sizes: widths of its states; by default learned from a call without states, or from
            its attribute hidden_size or state_size.

    Raises:
        CellContractError: it cannot be wrapped; the message says why.

    Example: `Run.create(config, cell=memtrain.wrap(nn.LSTMCell(64, 64), vocab_size=9))`.
    """
    space = space_of(vocab_size, values)
    cell = _check_kind(cell)
    name = type(cell).__name__
    size = input_size or _attribute(cell, INPUT_SIZES)
    if not isinstance(size, int) or size < 1:
        raise CellContractError(
            f"{name}: has no attribute {' or '.join(INPUT_SIZES[:2])}; pass "
            "wrap(cell, vocab_size, input_size=...)"
        )
    weight = next((p for p in cell.parameters() if p.is_floating_point()), torch.empty(0))
    with evaluation_mode(cell), preserve_rng_state():
        torch.manual_seed(0)
        x = torch.randn(ROWS, size, device=weight.device, dtype=weight.dtype)
        form = _find_form(cell, x, state_sizes)
        _check_states(cell, x, form)
    embedding = make_embedding(space, size).to(weight.device, weight.dtype)
    return WrappedCell(cell, embedding, form)


def _check_kind(cell: object) -> nn.Module:
    """The cell, unless it is not one step of a recurrent network."""
    if isinstance(cell, type):
        raise CellContractError(
            f"{cell.__name__}: is a class; pass an instance, wrap({cell.__name__}(...))"
        )
    name = type(cell).__name__
    if not isinstance(cell, nn.Module):
        raise CellContractError(f"{name}: must be a torch.nn.Module; {NEEDED}")
    if hasattr(cell, "memory_tokens"):
        raise CellContractError(f"{name}: is a cell of memtrain already; use it without wrap")
    _refuse_layer(type(cell))
    return cell


def _refuse_layer(cell_class: type) -> None:
    if issubclass(cell_class, nn.RNNBase):
        layers = (nn.RNN, nn.GRU, nn.LSTM)
        kind = next((one.__name__ for one in layers if issubclass(cell_class, one)), "RNN")
        raise CellContractError(
            f"{cell_class.__name__}: runs over whole sequences; wrap one step of it, "
            f"torch.nn.{kind}Cell"
        )


def _attribute(cell: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these attributes that is a size."""
    found = (getattr(cell, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


# ------------------------------------------------------------------------------------- the form


def _find_form(cell: nn.Module, x: Tensor, sizes: Sequence[int] | None) -> _Form:
    """The first form in which a cell takes the states that it returns."""
    name = type(cell).__name__
    arguments, time, order = _arguments(cell)
    problem, forms = "", _candidates(cell, x, sizes, arguments, time)
    for state_first in (order, not order):
        for passed, widths in forms:
            form = _Form(widths, passed, state_first, time)
            states = [x.new_zeros(ROWS, width).normal_() for width in widths]
            try:
                with torch.no_grad():
                    new = form.step(cell, x, states)
            except Exception as error:  # another form may fit
                problem = problem or f"raised {describe_error(error)}"
                continue
            if found := _mismatch(states, new):
                problem = problem if problem.startswith("returned") else f"returned {found}"
                continue
            return form
    if not forms:
        raise CellContractError(
            f"{name}: the sizes of its states are unknown: it cannot be called without states, and "
            f"has no attribute {' or '.join(STATE_SIZES[:2])}; pass wrap(..., state_sizes=(...,))"
        )
    tried = ", ".join(str(widths) for _, widths in forms)
    raise CellContractError(
        f"{name}: no form of call fits (states of sizes {tried}); it {problem}; {NEEDED}"
    )


def _mismatch(states: Sequence[Tensor], new: Sequence[Any]) -> str:
    """What is wrong with the new states; empty if nothing is."""
    if not all(isinstance(state, Tensor) for state in new):
        return f"{', '.join(type(state).__name__ for state in new)} instead of tensors"
    old, shapes = ([tuple(state.shape) for state in each] for each in (states, new))
    if old != shapes:
        return f"states of shapes {shapes} from states of shapes {old}"
    return "" if all(state.is_floating_point() for state in new) else "states that are not real"


def _arguments(cell: nn.Module) -> tuple[int, tuple[str, ...], bool]:
    """The number of arguments for states, the required times, and whether states come first."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = inspect.signature(cell.forward).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return 1, (), False
    time = [one for one in found if one.name in TIME_NAMES]
    rest = [
        one
        for number, one in enumerate(one for one in found if one not in time)
        if one.kind in positional and (number < 2 or one.default in (inspect.Parameter.empty, None))
    ]
    if len(rest) < 2 and not any(one.kind is one.VAR_POSITIONAL for one in found):
        raise CellContractError(
            f"{type(cell).__name__}: forward takes {len(rest)} argument"
            f"{'' if len(rest) == 1 else 's'}, not an input and states; {NEEDED}"
        )
    required = tuple(one.name for one in time if one.default is one.empty)
    names = [one.name.lower() for one in rest[:2]]
    state_first = names[:1] and names[0] in STATE_NAMES and names[-1] not in STATE_NAMES
    return max(1, len(rest) - 1), required, bool(state_first)


def _candidates(
    cell: nn.Module, x: Tensor, sizes: Sequence[int] | None, arguments: int, time: tuple[str, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    """(how states are passed, their sizes), the likeliest first."""
    if sizes is None and (width := _attribute(cell, STATE_SIZES)) and arguments > 1:
        sizes = (width,) * arguments
    if sizes is not None:
        if not isinstance(sizes, Sequence):
            raise CellContractError(
                f"state_sizes={sizes!r}: must be the widths of all states, such as ({sizes!r},)"
            )
        sizes = tuple(sizes)
        if arguments > 1:
            return [("arguments", sizes)]
        return [("tensor", sizes)] * (len(sizes) == 1) + [("tuple", sizes), ("list", sizes)]
    try:
        with torch.no_grad():
            result = cell(x, **dict.fromkeys(time, 1.0))
    except Exception:  # it needs its states
        width = _attribute(cell, STATE_SIZES)
        if width is None:
            return []
        return [("tensor", (width,)), *(("tuple", (width,) * n) for n in (2, 3, 1))]
    every = _states_of(result, len(result) if isinstance(result, (tuple, list)) else 1)
    found = [one.shape[-1] for one in every if isinstance(one, Tensor) and one.dim() > 0]
    if not isinstance(result, (tuple, list)):
        return [("tensor", tuple(found))] if found else []
    inner = result[-1] if result and isinstance(result[-1], (tuple, list)) else result
    kind = "list" if isinstance(inner, list) else "tuple"
    return [(kind, tuple(found)), ("tensor", tuple(found[-1:]))] if found else []


def _check_states(cell: nn.Module, x: Tensor, form: _Form) -> None:
    """Refuse states that are not used or do not fit into a memory; freeze what is not trained."""
    name, widths = type(cell).__name__, ", ".join(map(str, form.sizes))
    token = math.gcd(*form.sizes)
    if len(set(form.sizes)) > 1 and token < min(SMALLEST_TOKEN, *form.sizes):
        raise CellContractError(
            f"{name}: its states have sizes {widths}, which memory tokens of one width hold only "
            f"if they have a common divisor of at least {SMALLEST_TOKEN}; choose other sizes"
        )
    with torch.enable_grad():
        states = [x.new_zeros(ROWS, width).normal_().requires_grad_() for width in form.sizes]
        named = {key: p for key, p in cell.named_parameters() if p.requires_grad}
        new = form.step(cell, x, states)
        total = torch.stack([(state * torch.randn_like(state)).sum() for state in new]).sum()
        if not total.requires_grad:
            raise CellContractError(f"{name}: its new states have no gradient")
        found = torch.autograd.grad(total, [*states, *named.values()], allow_unused=True)
    for number in range(len(states)):
        if found[number] is None:
            raise CellContractError(
                f"{name}: its new states do not depend on state {number + 1} of {len(states)}"
            )
    for parameter, gradient in zip(named.values(), found[len(states) :], strict=True):
        if gradient is None:  # it only makes the output, which is not used
            parameter.requires_grad_(False)


# ---------------------------------------------------------------------------------- by its name


def is_wrappable(cell_class: type) -> bool:
    """Whether a class is to be wrapped: it is not made as Class(vocab_size=...) or (values=...)."""
    _refuse_layer(cell_class)
    if hasattr(cell_class, "memory_tokens"):
        return False
    try:
        found = inspect.signature(cell_class).parameters.values()
    except (TypeError, ValueError):
        return False
    made_for = ("vocab_size", "values")
    return not any(one.name in made_for or one.kind is one.VAR_KEYWORD for one in found)


def constructor_options(cell_class: type, config: CellConfig) -> dict[str, Any]:
    """The options of a cell to wrap; sizes that they leave out are cell.memory_dim."""
    options: dict[str, Any] = dict(config.options)
    hidden = next((options[name] for name in STATE_SIZES if name in options), config.memory_dim)
    for one in inspect.signature(cell_class).parameters.values():
        if one.name in (*INPUT_SIZES, *STATE_SIZES) and one.default is one.empty:
            options.setdefault(one.name, hidden)
    return options
