"""The cost of a computation, counted by running it (the paper's appendix "Definitions").

`sequential_ops` counts SeqFLOPs, the operations that must run one after another;
`recurrent_depth` counts the credit path, in applications of the recurrent cell.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

# Names are those of the functions torch reports, without underscores at either end: `add_` and
# `__add__` are one operation, `add`.

_FREE = {
    "attributes such as .mT and .data": "get requires_grad",
    "views: another shape on the same numbers": """
        adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk
        diagonal dsplit expand expand_as flatten getitem hsplit imag movedim moveaxis narrow
        permute ravel real reshape reshape_as select split split_with_sizes squeeze swapaxes
        swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk unsafe_split
        unsqueeze view view_as view_as_complex view_as_real vsplit""",
    "copies: the same numbers in another place, order or precision": """
        alias as_tensor asarray bfloat16 block_diag bool cat clone column_stack concat
        concatenate contiguous copy cpu cuda deepcopy detach diag diag_embed double dstack flip
        float half hstack int long meshgrid pack_padded_sequence pad pad_packed_sequence
        pad_sequence pin_memory repeat repeat_interleave reversed roll rot90 setitem short stack
        tensor tile to type type_as vstack""",
    "selections: numbers are picked or masked, none is computed": """
        gather index_copy index_fill index_put index_select masked_fill masked_scatter
        masked_select one_hot scatter take take_along_dim tril triu where""",
    "fills with a constant or with noise": """
        bernoulli constant exponential fill kaiming_uniform normal random trunc_normal uniform
        xavier_uniform zero""",
}

OPERATION_COST: dict[str, int] = {
    **{name: 0 for names in _FREE.values() for name in names.split()},
    "scaled_dot_product_attention": 3,  # scores, softmax, weighted sum
    "multi_head_attention_forward": 5,  # projections in (parallel), attention, projection out
    # Fused cells cost what they cost written out; the two linears of a cell are parallel.
    "rnn_tanh_cell": 3,  # linear, sum, tanh
    "rnn_relu_cell": 3,  # linear, sum, relu
    "gru_cell": 8,  # linear, sum, sigmoid, reset product, sum, tanh, blend (product, sum)
    "lstm_cell": 7,  # linear, sum, sigmoid, input product, sum, tanh, output product
}
"""Sequential operations of one call; 1 for operations that are not listed (linear, gelu, ...)."""

CELL_OF_SEQUENCE = {
    "rnn_tanh": "rnn_tanh_cell",
    "rnn_relu": "rnn_relu_cell",
    "gru": "gru_cell",
    "lstm": "lstm_cell",
}
"""Fused loops over time (nn.GRU and others) and the cell that they apply at every step."""

CONSTRUCTORS = frozenset(
    {"arange", "empty_strided", "eye", "linspace", "logspace", "new_tensor", "randperm"}
    | {"scalar_tensor", "tril_indices", "triu_indices"}
    | {
        pattern.format(name)
        for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
        for pattern in ("{}", "{}_like", "new_{}")
    }
)
"""Functions whose results depend on no tensor's values: they wait for nothing."""


def sequential_ops(function: Callable[[], object]) -> int:
    """Run `function` and count the operations on its critical path (SeqFLOPs, "Definitions").

    The critical path is the part that an infinitely parallel computer still does in sequence.
    Every call into torch is one operation of `OPERATION_COST`. A result that requires grad is
    taken to be backpropagated, whether or not `function` does it: backpropagation starts when
    the forward pass is done and runs its differentiable operations again, in reverse. So an
    operation on the way counts twice with grad and once under `no_grad`; a `backward()` or an
    optimizer's step inside `function` adds nothing.

    Depth belongs to a tensor's storage, so views see in-place writes through each other. The
    price: a tensor is ready only when all of it is, and writes to different parts of it count
    as if they were to the same part.

    Not seen: values that pass through Python (`item()`), recomputation by checkpointing, and
    the inside of compiled code and `torch.func` transforms. A custom `autograd.Function` is
    counted by what its forward calls, and as one operation backwards.

    Example:
        sequential_ops(lambda: objective(batch, generator).total)
    """
    with _CriticalPath() as path:
        result = function()
    # A custom autograd.Function gets its backward node after the last call that `path` saw.
    length = max(path.length, *(path.through(tensor) for tensor in _tensors(result)), 0)
    del result  # before `path`, which then takes the graph apart
    return length


# Tests check types at every call, and these are called at every operation: no_type_check.
@no_type_check
class _CriticalPath(TorchFunctionMode):
    """Follows the depth of every tensor. Calls made inside a call are not seen: it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        # Weak keys compared by identity: neither kept alive, nor confused when ids are recycled.
        self._forward = WeakIdKeyDictionary()
        self._backward: dict[Node, int] = {}

    def __del__(self) -> None:
        # A node that Python has seen is freed by a call within the call that frees the node before
        # it: a long graph freed at once overflows the stack. Newest first, they go one by one.
        while self._backward:
            self._backward.popitem()

    def __torch_function__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        full_name = getattr(func, "__name__", "")
        name = full_name.strip("_")
        if name in CONSTRUCTORS:
            return func(*args, **kwargs)
        if full_name == "__get__" and not isinstance(got := func(*args, **kwargs), Tensor):
            return got  # a shape, a dtype, a device: most calls of a checked or fused forward
        # Before the call, which may write to its inputs.
        inputs = [(tensor, _version(tensor)) for tensor in _tensors((args, kwargs))]
        forward = max((self._forward_depth(tensor) for tensor, _ in inputs), default=0)
        backward = max((self._backward_depth(tensor) for tensor, _ in inputs), default=0)

        result = func(*args, **kwargs)

        # Computing gradients backpropagates the tensors they are gradients of.
        cost = backward if func is torch.autograd.grad else _cost(name, args)
        for tensor in _tensors(args[0] if name == "setitem" else result):
            # Some calls do nothing: dropout in evaluation hands its input back.
            untouched = not full_name.endswith("_") and any(
                tensor is before and _version(tensor) == version for before, version in inputs
            )
            paid = 0 if untouched else cost
            self._record(tensor, forward + paid, backward + paid)
        return result

    def through(self, tensor: Tensor) -> int:
        """Operations forward to this tensor and, from it, backward."""
        return self._forward_depth(tensor) + self._backward_depth(tensor)

    def _record(self, tensor: Tensor, forward: int, backward: int) -> None:
        self._forward[_storage(tensor)] = max(self._forward_depth(tensor), forward)
        if torch.is_grad_enabled() and tensor.grad_fn is not None:
            self._backward[tensor.grad_fn] = backward
        self.length = max(self.length, self.through(tensor))

    def _forward_depth(self, tensor: Tensor) -> int:
        return self._forward.get(_storage(tensor), 0)  # type: ignore[return-value]

    def _backward_depth(self, tensor: Tensor) -> int:
        root = tensor.grad_fn
        if root is None:
            return 0
        if root not in self._backward:
            # A node no call returned: a custom Function, a view of something written to, or a
            # graph older than the count. Its depth follows from the nodes behind it.
            paths = _longest_paths(root, _is_custom_operation, self._backward.get)
            self._backward.update(paths)
        return self._backward[root]


@no_type_check
def _cost(name: str, args: Sequence) -> int:
    """Sequential operations of one call."""
    if name in CELL_OF_SEQUENCE and len(args) == 9:
        return OPERATION_COST[CELL_OF_SEQUENCE[name]] * _sequential_cells(args)
    return OPERATION_COST.get(name, 1)


def _sequential_cells(args: Sequence) -> int:
    """Applications of a cell on the critical path of `torch.gru(*args)` and others."""
    if isinstance(args[3], list | tuple):  # packed: data, batch_sizes, state, weights, ...
        steps, layers, bidirectional = len(args[1]), args[5], args[8]
    else:  # inputs, state, weights, ...
        steps, layers, bidirectional = args[0].shape[1 if args[8] else 0], args[4], args[7]
    # A layer may follow the one below at a distance of one step, unless that one also runs
    # from the end to the beginning.
    return steps * layers if bidirectional else steps + layers - 1


@no_type_check
def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


@no_type_check
def _storage(tensor: Tensor) -> object:
    """The storage that a tensor shares with its views."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # sparse and functorch tensors have none
        return tensor


@no_type_check
def _version(tensor: Tensor) -> int:
    """How often a tensor was written to in place; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def recurrent_depth(loss: Float[Tensor, "*shape"]) -> int:
    """The credit path of `loss` in applications of the cell (appendix "Definitions").

    The largest number of marked nodes on any way through the autograd graph from `loss` to a
    leaf: O(T) for BPTT, O(1) for SMT. Mark applications with `CountedCell`.
    """
    root = loss.grad_fn
    return 0 if root is None else _longest_paths(root, _is_application)[root]


class CountedCell(nn.Module):
    """A cell whose applications `recurrent_depth` can count; it computes what `cell` does."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    @property
    def memory_tokens(self) -> int:
        return cast(int, self.cell.memory_tokens)

    @property
    def memory_dim(self) -> int:
        return cast(int, self.cell.memory_dim)

    def forward(
        self, memory: Float[Tensor, "B M D"], token: Int[Tensor, " B"]
    ) -> Float[Tensor, "B M D"]:
        return mark_application(self.cell(memory, token))


def mark_application(memory: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same memory, with a node in the autograd graph that marks an application of a cell."""
    return _Application.apply(memory)  # type: ignore[return-value]


class _Application(torch.autograd.Function):
    """The identity, forward and backward."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor) -> Tensor:
        return memory.clone()  # not a view: autograd forbids in-place writes to a Function's views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _is_application(node: Node) -> bool:
    return node.name() == f"{_Application.__name__}Backward"


def _is_custom_operation(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and not _is_application(node)


def _longest_paths(
    root: Node,
    counts: Callable[[Node], bool],
    known: Callable[[Node], int | None] = lambda node: None,
) -> dict[Node, int]:
    """For `root` and all nodes behind it, the most counted nodes on a path to a leaf.

    Without recursion, since graphs are deep, and in time linear in the edges.

    Args:
        root: Where the paths start.
        counts: Whether a node adds one to the paths through it.
        known: The answer for a node, if the caller has it; then nothing behind it is visited.
    """
    longest: dict[Node, int] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node in longest:
            stack.pop()
            continue
        answer = known(node)
        if answer is None:
            behind = [source for source, _ in node.next_functions if source is not None]
            unanswered = [source for source in behind if source not in longest]
            if unanswered:
                stack.extend(unanswered)
                continue
            answer = counts(node) + max((longest[source] for source in behind), default=0)
        longest[node] = answer
        stack.pop()
    return longest
