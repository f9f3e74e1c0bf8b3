"""memtrain export."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError

FORMATS: dict[str, str] = {"onnx": "onnx_file:write_onnx", "pt2": "torch_export:write_pt2"}
"""Function of `memtrain.deploy` that writes each format, as module:function. It takes the model,
the path and the options of this command, and returns the lines to print."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the recurrent network of a run in a form that other programs run. Several formats can
    be written at once. The teacher is not part of it."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    onnx: Path | None = None
    """Write one step, (memory, token) to (logits, next_memory), to this ONNX file, which programs
    in any language run without memtrain."""
    pt2: Path | None = None
    """Write the same step to this file by torch.export, for programs with torch but no memtrain."""
    int8: bool = False
    """With --onnx: store matrices in 8 bits, a quarter of the size. The loss that this costs is
    measured on held-out data, if the data that the run was trained on can be opened here."""
    time: bool = False
    """Time a step of the network and of --onnx and --pt2, one token at a time on this CPU."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell class that the run's config names, and its task to measure a loss."""

    def __post_init__(self) -> None:
        for name in ("onnx", "pt2"):
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise MemtrainError(f"{name}={path}: is a folder; name a file in it")
        if self.int8 and self.pt2 is not None and self.onnx is None:
            raise MemtrainError("int8: is of --onnx; name a file for it, or leave --int8 out")


def export(arguments: list[str]) -> int:
    """Write a trained network in other programs' formats."""
    from importlib import import_module

    options = parse(Export, arguments, "memtrain export")
    chosen: dict[str, Path] = {
        name: path for name in FORMATS if (path := getattr(options, name)) is not None
    }
    if not chosen:
        names = ", ".join(f"--{name}" for name in FORMATS)
        raise MemtrainError(f"no format is chosen; give at least one of {names}")

    from memtrain.generation.pretrained import open_model
    from memtrain.training.console import make_reporter

    model = open_model(
        options.run,
        best=options.best,
        allow_code=options.allow_code,
        reporter=make_reporter(),
        device="cpu",
    )
    for name, path in chosen.items():
        module, _, function = FORMATS[name].partition(":")
        write = getattr(import_module(f"memtrain.deploy.{module}"), function)
        for line in write(model, path, options):
            print(line)
    if options.time:
        from memtrain.deploy.timing import time_steps

        print("\n".join(time_steps(model, options.onnx, options.pt2)))
    return 0
