"""memtrain export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError

FORMATS: dict[str, str] = {"html": "browser.page:write_html"}
"""Function of `memtrain.deploy` that writes each format, as module:function. It takes the model,
the path and the options of this command, and returns the lines to print."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the recurrent network of a run in a form that other programs run. Several formats can
    be written at once. The teacher is not part of it."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    html: Path | None = None
    """Write one HTML page that runs the network in a browser, offline: it writes or draws, and
    shows the memory."""
    html_weights: Literal["exact", "fp16", "int8"] = "exact"
    """Precision of the weights in the page: unchanged, or rounded to 16 or 8 bits, for a smaller
    file."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell class that the run's config names."""


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
    return 0
