"""Write one step of a network as an ONNX file, checked against the network in ONNX Runtime."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memtrain.deploy.int8 import loss_cost, to_int8
from memtrain.deploy.step import (
    CHECKED_STEPS,
    INPUTS,
    OUTPUTS,
    RunStep,
    check_step,
    describe_step,
    quiet,
    signature,
    trace,
)
from memtrain.errors import MemtrainError, describe_error
from memtrain.files import write_output
from memtrain.generation.pretrained import Pretrained

if TYPE_CHECKING:
    from onnx import ModelProto

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
"""The first in which GELU is one operator; runtimes of 2023 and later have it."""
MAX_BYTES = 2**31 - 2**20
"""An ONNX file is one protocol buffer, which has at most 2 GiB."""


def write_onnx(model: Pretrained, path: Path, options: Any) -> list[str]:
    """Write the step of a network as ONNX, after running it in ONNX Runtime.

    Args:
        model: the network.
        path: the file.
        options: those of memtrain export, of which it takes int8 and allow_code.

    Returns:
        What was written and how far it differs from the network, for the console.

    Raises:
        MemtrainError: a package is missing, the cell cannot be traced, or the file differs.
    """
    require_packages()
    proto = make_onnx(model)
    content = proto.SerializeToString()
    step = onnx_step(content)
    largest = check_step(model, step, str(path))
    lines = [f"checked: over {CHECKED_STEPS} steps its numbers are the network's to {largest:.1e}"]
    if options.int8:
        content = to_int8(proto).SerializeToString()
        lines = [f"{lines[0]}, before its matrices were rounded to 8 bits"]
        try:
            cost = loss_cost(model, step, onnx_step(content), allow_code=options.allow_code)
            lines.append(str(cost))
        except MemtrainError as error:
            lines.append(f"the loss that 8 bits cost was not measured: {error}")
    write_output(path, content)
    return [f"{path}: {len(content) / 2**20:.2f} MiB, {signature(model)}", *lines]


def require_packages() -> None:
    """Refuse to start without the packages."""
    for name in ONNX_PACKAGES:
        try:
            import_module(name)
        except ImportError:
            raise MemtrainError(
                f'--onnx: needs the package {name}: pip install "memtrain[onnx]"'
            ) from None


def make_onnx(model: Pretrained) -> "ModelProto":
    """The step as an ONNX model, with what `describe_step` says as its metadata.

    Raises:
        MemtrainError: the cell cannot be traced, or has an operation that ONNX lacks.
    """
    import onnx

    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    if size > MAX_BYTES:
        raise MemtrainError(
            f"--onnx: {model.name} has {size / 2**30:.1f} GiB of weights, an ONNX file holds 2; "
            "--pt2 has no limit"
        )
    program = trace(model)
    try:
        with quiet():
            made = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=INPUTS,
                output_names=OUTPUTS,
            )
    except Exception as error:  # torch.onnx has several, and passes on those of its parts
        raise MemtrainError(
            f"--onnx: an operation of the cell {type(model.cell).__name__} has no form in ONNX "
            f"({describe_error(error)})"
        ) from error
    assert made is not None
    proto = made.model_proto
    _clean(proto)
    proto.producer_name = "memtrain"
    for name, value in describe_step(model).items():
        proto.metadata_props.add(key=name, value=value)
    onnx.checker.check_model(proto)
    return proto


def _clean(proto: "ModelProto") -> None:
    """Remove notes of torch's exporter, half of a small file, and name the batch's size."""
    graph = proto.graph
    del graph.value_info[:]
    for one in (*graph.node, *graph.input, *graph.output, *graph.initializer, graph):
        del one.metadata_props[:]
        one.doc_string = ""
    for one in (*graph.input, *graph.output):
        for size in one.type.tensor_type.shape.dim:
            if size.HasField("dim_param"):
                size.dim_param = "batch"


def onnx_step(content: bytes, threads: int = 1) -> RunStep:
    """A step of an ONNX file in ONNX Runtime, on a CPU.

    Args:
        content: the file.
        threads: that one operation may use.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 3  # errors; warnings are about fused operations
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])

    def step(memory: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found: Any = session.run(list(OUTPUTS), dict(zip(INPUTS, (memory, token), strict=True)))
        return found[0], found[1]

    return step
