"""memtrain export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError

FORMATS: dict[str, str] = {
    "hf": "hugging_face.export:write",
    "onnx": "onnx_file:write_onnx",
    "pt2": "torch_export:write_pt2",
    "html": "browser.page:write_html",
}
"""Function of `memtrain.deploy` that writes each format, as module:function. It takes the model,
the path and the options of this command, and returns the lines to print."""
ENDINGS = {"onnx": (".onnx",), "pt2": (".pt2",), "html": (".html", ".htm")}
"""How the file of each format must end, by which other programs know it."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the recurrent network of a run in a form that other programs run. Several formats can
    be written at once. The teacher is not part of it."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    hf: Path | None = None
    """Folder for the transformers package: weights, config, tokenizer, code and model card."""
    push: str | None = None
    """Upload the folder of --hf to huggingface.co, as USER/NAME."""
    onnx: Path | None = None
    """Write one step, (memory, token) to (logits, next_memory), to this ONNX file, which programs
    in any language run without memtrain."""
    int8: bool = False
    """With --onnx: store matrices in 8 bits, a quarter of the size. The loss that this costs is
    measured on held-out data, if the data that the run was trained on can be opened here."""
    pt2: Path | None = None
    """Write the same step to this file by torch.export, for programs with torch but no memtrain."""
    html: Path | None = None
    """Write one HTML page that runs the network in a browser, offline: it writes or draws, and
    shows the memory."""
    html_weights: Literal["exact", "fp16", "int8"] = "exact"
    """Precision of the weights in the page: unchanged, or rounded to 16 or 8 bits, for a smaller
    file."""
    time: bool = False
    """Time a step of the network and of --onnx and --pt2, one token at a time on this CPU."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell class that the run's config names, and its task to measure a loss."""

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in FORMATS):
            names = ", ".join(f"--{name}" for name in FORMATS)
            raise MemtrainError(f"no format is chosen; give at least one of {names}")
        for name, endings in ENDINGS.items():
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise MemtrainError(f"{name}={path}: is a folder; name a file in it")
            if path is not None and path.suffix.lower() not in endings:
                raise MemtrainError(
                    f"{name}={path}: is another kind of file; end the name in {endings[0]}"
                )
        for option, given, needed in (
            (f"push {self.push}", self.push is not None, "hf"),
            ("int8", self.int8, "onnx"),
            (f"html-weights {self.html_weights}", self.html_weights != "exact", "html"),
        ):
            if given and getattr(self, needed) is None:
                raise MemtrainError(f"--{option}: is an option of --{needed}; name its file too")


def export(arguments: list[str]) -> int:
    """Write a trained network in other programs' formats."""
    from importlib import import_module

    options = parse(Export, arguments, "memtrain export")
    from memtrain.generation.pretrained import open_model
    from memtrain.training.console import make_reporter

    model = open_model(
        options.run,
        best=options.best,
        allow_code=options.allow_code,
        reporter=make_reporter(),
        device="cpu",
    )
    for name, writer in FORMATS.items():
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        module, _, function = writer.partition(":")
        write = getattr(import_module(f"memtrain.deploy.{module}"), function)
        for line in write(model, path, options):
            print(line)
    if options.time:
        from memtrain.deploy.timing import time_steps

        print("\n".join(time_steps(model, options.onnx, options.pt2)))
    return 0
