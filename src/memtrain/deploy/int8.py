"""Store the matrices of an ONNX file in 8 bits, and measure the loss that this costs.

Computation stays in 32 bits: two plain operators make floats of the whole numbers, which a runtime
does once when it loads the file. A matrix has one scale per output (per token for an embedding), so
that its largest number there becomes 127.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from memtrain.config import Custom
from memtrain.data.task import build_task
from memtrain.deploy.step import RunStep, token_type
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import EVALUATION_SEED
from memtrain.generation.pretrained import Pretrained
from memtrain.losses import value_losses
from memtrain.shapes import IGNORE_INDEX, Batch, Space, Values, count_targets, has_target

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

SMALLEST = 1024
"""Numbers of a matrix below which 8 bits save less than the operators that read them take."""
TOKENS = 2**14
"""Held-out inputs on which the loss is measured, about."""
ROWS = 64
"""Sequences that are read together."""


# ------------------------------------------------------------------------------------- the file


def to_int8(proto: "ModelProto") -> "ModelProto":
    """A copy of an ONNX model whose large matrices are whole numbers of 8 bits with scales."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(proto)
    _fold(made)
    writer = _Writer(made)
    nodes: list[NodeProto] = []
    for node in made.graph.node:
        nodes += writer.rewritten(node)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    _drop_unused(made)
    made.metadata_props.add(key="weights", value="int8")
    onnx.checker.check_model(made)
    return made


class _Writer:
    """Replaces the matrices that nodes of a graph read; each is stored once per axis."""

    def __init__(self, proto: "ModelProto") -> None:
        from onnx import numpy_helper

        self.graph = proto.graph
        self.matrices = {
            one.name: numpy_helper.to_array(one)
            for one in proto.graph.initializer
            if len(one.dims) == 2 and math.prod(one.dims) >= SMALLEST and one.data_type == 1
        }
        self.stored: set[str] = set()

    def rewritten(self, node: "NodeProto") -> list["NodeProto"]:
        """The nodes that take the place of one."""
        if node.op_type == "Gather" and node.input[0] in self.matrices and _axis_of(node) == 0:
            return self._gather(node)
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in self.matrices:
            transposed = any(one.name == "transB" and one.i for one in node.attribute)
            return self._product(node, axis=0 if transposed else 1)
        return [node]

    def _product(self, node: "NodeProto", axis: int) -> list["NodeProto"]:
        """A product with a matrix; `axis` is that of its outputs."""
        name = node.input[1]
        node.input[1] = floats = f"{name}.floats.{axis}"
        if floats in self.stored:
            return [node]
        self.stored.add(floats)
        return [*_times(*self._store(name, axis), floats), node]

    def _gather(self, node: "NodeProto") -> list["NodeProto"]:
        """The rows of a table, each times its scale; only these rows become floats."""
        from onnx import helper

        whole, scales = self._store(node.input[0], 0)
        index, result = node.input[1], node.output[0]
        rows = f"{result}.rows", f"{result}.scales"
        return [
            helper.make_node("Gather", [whole, index], [rows[0]], axis=0),
            helper.make_node("Gather", [scales, index], [rows[1]], axis=0),
            *_times(*rows, result),
        ]

    def _store(self, name: str, axis: int) -> tuple[str, str]:
        """Add a matrix as whole numbers, and its scales; returns their names."""
        from onnx import numpy_helper

        names = f"{name}.int8.{axis}", f"{name}.scales.{axis}"
        if names[0] not in self.stored:
            self.stored.add(names[0])
            matrix = self.matrices[name]
            largest = np.abs(matrix).max(axis=1 - axis, keepdims=True)
            scales = np.maximum(largest / 127, np.finfo(np.float32).tiny).astype(np.float32)
            whole = np.rint(matrix / scales).astype(np.int8)
            for one, content in zip(names, (whole, scales), strict=True):
                self.graph.initializer.append(numpy_helper.from_array(content, one))
        return names


def _times(whole: str, scales: str, result: str) -> list["NodeProto"]:
    """Whole numbers times their scales. Not DequantizeLinear: around that ONNX Runtime rounds what
    the matrix is multiplied with to 8 bits too, other runtimes do not."""
    from onnx import TensorProto, helper

    floats = f"{result}.whole"
    return [
        helper.make_node("Cast", [whole], [floats], to=TensorProto.FLOAT),
        helper.make_node("Mul", [floats, scales], [result]),
    ]


def _axis_of(node: "NodeProto") -> int:
    return next((one.i for one in node.attribute if one.name == "axis"), 0)


def _fold(proto: "ModelProto") -> None:
    """Compute the splits and transposes of constants, which are matrices cut in parts."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    graph = proto.graph
    constants = {one.name: one for one in graph.initializer}
    kept = []
    for node in graph.node:
        known = [constants.get(name) for name in node.input]
        if node.op_type not in ("Split", "Transpose") or None in known:
            kept.append(node)
            continue
        arrays = {one.name: numpy_helper.to_array(one) for one in known if one is not None}
        results = ReferenceEvaluator(node).run(None, arrays)
        for name, value in zip(node.output, results, strict=True):
            constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            graph.initializer.append(constants[name])
    del graph.node[:]
    graph.node.extend(kept)
    _drop_unused(proto)


def _drop_unused(proto: "ModelProto") -> None:
    graph = proto.graph
    used = {name for node in graph.node for name in node.input}
    used |= {one.name for one in graph.output}
    kept = [one for one in graph.initializer if one.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


# ------------------------------------------------------------------------------------- its cost


class LossCost(NamedTuple):
    """The loss of a network on held-out data, and the change of it."""

    loss: float
    change: float
    error: float
    """The standard error of the change, over sequences."""
    inputs: int
    unit: str
    source: str

    def __str__(self) -> str:
        return (
            f"8 bits change the loss per {self.unit} from {self.loss:.4f} to "
            f"{self.loss + self.change:.4f} ({self.change:+.4f}, standard error {self.error:.4f}) "
            f"on {self.inputs:,} held-out inputs of {self.source}"
        )


def loss_cost(
    model: Pretrained, plain: RunStep, other: RunStep, *, allow_code: bool = False
) -> LossCost:
    """What replacing one step by another costs on the held-out data that a run was made for.

    Both read the same sequences from the empty memory.

    Args:
        model: the network of both.
        plain: its step.
        other: the step that takes its place.
        allow_code: import the task class that the run's config names.

    Raises:
        MemtrainError: the data cannot be opened here, or is of another kind.
    """
    config = model.config.data
    if isinstance(config, Custom) and not allow_code:
        raise MemtrainError(f"its task is your own class, {config.path}; --allow-code imports it")
    task = build_task(config)
    if task.space != model.space or _meaning(task.spelling) != _meaning(model.spelling):
        raise MemtrainError("the data that its config names is now of another kind")
    rows = max(2, TOKENS // task.sequence_length)
    batch = task.held_out(rows, torch.Generator().manual_seed(EVALUATION_SEED))
    scored = has_target(batch.targets).any(dim=1)
    losses = [_losses(model, step, batch)[scored] for step in (plain, other)]
    change = losses[1] - losses[0]
    error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.nan
    return LossCost(
        float(losses[0].mean()),
        float(change.mean()),
        error,
        batch.inputs.shape[0] * batch.inputs.shape[1],
        task.unit,
        str(getattr(config, "path", "")) or config.kind,
    )


def _meaning(codec: object) -> tuple[object, ...]:
    """The parts of a codec on which the meaning of tokens depends."""
    names = ("vocab_size", "picture", "tokenizer", "classes")
    return tuple(getattr(codec, name, None) for name in names)


def _losses(model: Pretrained, step: RunStep, batch: Batch) -> Float[Tensor, " B"]:
    """The mean loss of each sequence, read step by step; only one step's logits are held."""
    losses = []
    kind = token_type(model.space)
    for inputs, targets in zip(batch.inputs.split(ROWS), batch.targets.split(ROWS), strict=True):
        memory = model.empty_memory(len(inputs)).numpy()
        total = torch.zeros(len(inputs), dtype=torch.float64)
        for token, target in zip(inputs.unbind(1), targets.unbind(1), strict=True):
            found, memory = step(memory, token.numpy().astype(kind))
            total += _step_losses(torch.from_numpy(found), target, model.space)
        counts = torch.stack([count_targets(row[None]).sum() for row in targets])
        losses.append(total / counts.clamp(min=1))
    return torch.cat(losses)


def _step_losses(outputs: Float[Tensor, "B V"], targets: Tensor, space: Space) -> Tensor:
    """The loss of each row's target, 0 without one."""
    if isinstance(space, Values):
        return value_losses(outputs, targets, space.likelihood).sum(-1)
    return F.cross_entropy(outputs, targets, ignore_index=IGNORE_INDEX, reduction="none")
