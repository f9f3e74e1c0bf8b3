"""Check, before training, that a checkpoint can hold all of a cell's state.

A checkpoint holds the values of the tensors in `state_dict()` and the state of torch's global RNG.
Any other state of a cell would be lost silently when a run resumes.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memtrain.errors import CellContractError, describe_error

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that a checkpoint can hold, with their names in safetensors."""
TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that AdamW's fused kernel supports."""
STEPS = 3
"""Training steps to run twice from the same saved state."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
Step = Callable[[Tensor, Tensor], Tensor]


def check_tensors(cell: nn.Module) -> None:
    """Refuse tensors that cannot be trained, saved or restored.

    Raises:
        CellContractError: names the tensor, the problem and the remedy.
    """
    parameters, buffers = dict(cell.named_parameters()), dict(cell.named_buffers())
    for name, tensor in (parameters | buffers).items():
        _require(
            not is_lazy(tensor),
            cell,
            f"{name} has no size yet; give sizes when the cell is made (nn.Linear instead of "
            "nn.LazyLinear), or call the cell once",
        )
        _require(
            not tensor.is_meta,
            cell,
            f"{name} is on the meta device and has no values; make the cell on a real device",
        )
    state = cell.state_dict()
    for name, value in state.items():
        _check_storable(cell, name, value)
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            _check_trainable(cell, name, parameter)
    kept = {name: tensor for name, tensor in (parameters | buffers).items() if name in state}
    _check_apart(cell, kept)


def _check_storable(cell: nn.Module, name: str, value: object) -> None:
    _require(
        isinstance(value, Tensor),
        cell,
        f"state_dict() holds {name} of type {type(value).__name__}, but a checkpoint holds tensors "
        "only; return a tensor from get_extra_state, or register a buffer instead",
    )
    assert isinstance(value, Tensor)
    _require(
        value.layout is torch.strided,
        cell,
        f"{name} is sparse ({value.layout}), which a checkpoint cannot hold; register "
        f"its to_dense(), or its indices and values as two buffers",
    )
    kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
    remedy = (
        "keep torch.view_as_real of it, and torch.view_as_complex in forward"
        if value.is_complex()
        else "convert it, or register it with persistent=False if it never changes"
    )
    _require(
        value.dtype in DTYPES,
        cell,
        f"{name} is {value.dtype}, which a checkpoint cannot hold ({kinds}); {remedy}",
    )
    _require(
        not _overlaps_itself(value),
        cell,
        f"{name} is expanded: several of its elements are one place in memory, so it cannot be "
        "loaded again; register its clone() with memory_format=torch.contiguous_format",
    )


def _check_trainable(cell: nn.Module, name: str, parameter: Tensor) -> None:
    kinds = ", ".join(str(kind).removeprefix("torch.") for kind in TRAINABLE)
    _require(
        parameter.dtype in TRAINABLE,
        cell,
        f"parameter {name} is {parameter.dtype}, which AdamW cannot train ({kinds})",
    )
    # empty_like keeps the strides only of a tensor without gaps.
    _require(
        parameter.numel() == 0 or torch.empty_like(parameter).stride() == parameter.stride(),
        cell,
        f"parameter {name} is a slice with gaps in memory, over which AdamW's kernel would write; "
        "make it nn.Parameter(slice.contiguous())",
    )


def _check_apart(cell: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Tied weights must be one tensor under several names, not two tensors that share memory."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor) * tensor.element_size(), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        _require(
            begin >= end,
            cell,
            f"{name} and {other} are two tensors in one memory, which are apart after a move to "
            "another device; tie weights by giving both places the same nn.Parameter",
        )


def _extent(tensor: Tensor) -> int:
    """Elements of memory between a tensor's first and last, both included."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share a place in memory."""
    if not tensor.numel():
        return False
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    reached = 0
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride <= reached:
            return True
        reached += (size - 1) * stride
    return False


def check_resume(cell: nn.Module, step: Step, memory: Tensor, token: Tensor) -> None:
    """Refuse a cell whose training steps depend on more than a checkpoint holds.

    Training steps are run twice from the same saved state. Unsaved state, such as the cell's own
    generator or counter, differs the second time, as it would in a resumed run.

    Args:
        cell: the cell, which is modified.
        step: calls it.
        memory: random memories to begin with.
        token: a token per row.
    """
    cell.train()
    saved = {name: value.detach().clone() for name, value in cell.state_dict().items()}
    first = _steps_from(cell, saved, step, memory, token)
    counters, unsaved = _counters(cell), _unsaved_buffers(cell, saved)
    second = _steps_from(cell, saved, step, memory, token)
    for name, value in _counters(cell).items():
        _require(
            counters.get(name, value) == value,
            cell,
            f"attribute {name} changes with every training step, and a checkpoint does not hold "
            "it, so a resumed run would differ; keep it in a buffer (register_buffer)",
        )
    for name, value in _unsaved_buffers(cell, saved).items():
        _require(
            name not in unsaved or _same(unsaved[name], value),
            cell,
            f"buffer {name} changes with every training step, but persistent=False keeps it out "
            "of checkpoints, so a resumed run would differ; leave persistent=False out",
        )
    own = [name for name, value in _attributes(cell) if isinstance(value, GENERATORS)]
    _require(
        len(first) == len(second) and all(map(_same, first, second)),
        cell,
        "two training steps from the same saved state differ; state outside parameters and buffers "
        f"({own[0] + ', a generator of its own' if own else 'own generator, counter, numpy'}) "
        "cannot be saved, so a resumed run would differ; draw from torch's global RNG "
        "(torch.rand without a generator), or keep the state in a buffer",
    )


def _steps_from(
    cell: nn.Module, saved: dict[str, Tensor], step: Step, memory: Tensor, token: Tensor
) -> list[Tensor]:
    """The memories and gradients of a few training steps after loading `saved`."""
    try:
        cell.load_state_dict(saved)
    except Exception as error:  # the user's code: any error is a broken contract
        raise CellContractError(
            f"{type(cell).__name__}: its own state_dict() cannot be loaded again; load_state_dict "
            f"raised {describe_error(error)}"
        ) from error
    torch.manual_seed(0)
    trained = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    # In a random direction: the norm of a normalized memory has no gradient.
    found, direction = [], memory
    for _ in range(STEPS):
        memory = memory.detach().requires_grad_()
        out = step(memory, token)
        gradients = gradients_of(cell, (out * direction).sum(), [memory, *trained])
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients[1:], strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=1e-3)
        found += [out.detach(), *(g for g in gradients if g is not None)]
        memory = out
    return found


def gradients_of(cell: nn.Module, total: Tensor, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of a cell's step, None for tensors that get none.

    Raises:
        CellContractError: it has no backward pass.
    """
    try:
        return torch.autograd.grad(total, wanted, allow_unused=True)
    except RuntimeError as error:
        raise CellContractError(
            f"{type(cell).__name__}: the backward pass of a step raised {describe_error(error)}"
        ) from error


def _attributes(cell: nn.Module) -> Iterator[tuple[str, object]]:
    for prefix, module in cell.named_modules():
        for name, value in vars(module).items():
            yield f"{prefix}.{name}" if prefix else name, value


def _counters(cell: nn.Module) -> dict[str, int]:
    return {name: value for name, value in _attributes(cell) if type(value) is int}


def _unsaved_buffers(cell: nn.Module, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name: buffer for name, buffer in cell.named_buffers() if name not in saved}
    return {name: b.clone() for name, b in named.items() if b.layout is torch.strided}


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; close on a GPU, where the order of sums varies."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    rtol, atol = (1e-3, 1e-4) if one.is_cuda else (0.0, 0.0)
    return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _require(kept: bool, cell: nn.Module, rule: str) -> None:
    if not kept:
        raise CellContractError(f"{type(cell).__name__}: {rule}")
