"""memtrain generate: text to the terminal as it is sampled, images as a grid, forecasts."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError, printable
from memtrain.files import refuse_links
from memtrain.generation import GenerateOptions

FORECASTS = 4
"""Places in the held-out data where forecasts start, unless --count is given."""
PATHS = 200
"""Sample paths of a forecast."""


@dataclass(frozen=True, kw_only=True)
class Generate(GenerateOptions):
    """Sample from the recurrent network of a run or of a pretrained model: text to the terminal,
    images as a PNG grid, forecasts of a series as a figure or numbers. It starts from the empty
    memory; the teacher is not used. On a terminal, control characters in a text are escaped
    (\\x1b); a pipe, a file and --out get them raw. Forecasts start at places in the held-out part
    of the data, so that they can be compared with what followed; memtrain.forecast in Python
    continues any past."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    prompt: str | None = None
    """Text to continue, or token numbers separated by spaces."""
    given: float | None = None
    """Complete held-out images from this fraction of their pixels, from the top."""
    image: Path | None = None
    """Complete this image file, resized like the training data, from its first half or the
    fraction --given."""
    memory: Path | None = None
    """Start from this memory file, which memtrain remember wrote with the same run, instead of the
    empty memory: as if the text that it has read stood before the prompt."""
    out: Path | None = None
    """File to write: the PNG grid (default: in RUN/samples, or in a folder named after the
    pretrained model), the text, which is also printed, or forecasts: .png, .csv or .npz."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell or task class that the run's config names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.given is not None and not 0 < self.given < 1:
            raise MemtrainError(f"given={self.given}: must be above 0 and below 1; 0.5 is half")
        if self.prompt is not None and (self.image or self.given):
            raise MemtrainError("--prompt is for text, --given and --image are for images")
        if self.label and self.given is not None and self.image is None:
            raise MemtrainError(
                "--label with --given: held-out images have their own classes; leave --label out, "
                "or complete --image FILE"
            )
        if self.out is not None and self.out.is_dir():
            raise MemtrainError(f"out={self.out}: is a folder; name a file in it")


def generate(arguments: list[str]) -> int:
    """Sample from a run or a pretrained model."""
    options = parse(Generate, arguments, "memtrain generate")
    model = _load(options)
    if model.spelling is None:
        print(generate_forecasts(model, options))
    elif model.spelling.picture is None:
        generate_text(model, options)
    else:
        print(generate_images(model, options))
    return 0


def _load(options: Generate) -> Any:
    """The run in a folder of that name, else the pretrained model of that name."""
    from memtrain.generation.pretrained import open_model, pretrained_names
    from memtrain.runs.run_folder import is_run
    from memtrain.shapes import Values
    from memtrain.training.console import make_reporter

    name, best, allowed = options.run, options.best, options.allow_code
    model = open_model(name, best=best, allow_code=allowed, reporter=make_reporter())
    if isinstance(model.space, Values):
        from memtrain.training.run import Run

        return Run.open(name, best=best, allow_code=allowed)  # for its held-out data
    if model.spelling is None:
        raise MemtrainError(
            f"{name}: its task ({model.config.data.kind}) asks for answers and has no sequences "
            "to sample; try a run of digits"
        )
    whole = options.given is None or options.image is not None or model.spelling.picture is None
    if whole or (name in pretrained_names() and not is_run(name)):
        return model

    from memtrain.training.run import Run

    return Run.open(name, best=best, allow_code=allowed)  # for its held-out images


def _memory(options: Generate) -> Any:
    """The memory to start from, if a file is named."""
    from memtrain.generation.memory import Memory

    return None if options.memory is None else Memory.load(options.memory)


def generate_text(model: Any, options: Generate) -> None:
    """Print one text as it is sampled, or several under headings; save them if --out is given."""
    from memtrain.generation.generate import check_text_file, generate_with

    codec = model.spelling
    if options.given is not None or options.image is not None or options.label:
        option = "--image" if options.image else "--given" if options.given else "--label"
        kind = "text" if codec.text else "tokens"
        raise MemtrainError(f"{option}: this model generates {kind}; start with --prompt")
    if options.out is not None:
        check_text_file(options.out)  # before anything is printed
    escape = printable if sys.stdout.isatty() else str
    memory = _memory(options)
    if (options.count or 1) > 1:
        samples = generate_with(model, options, options.prompt, memory=memory)
        for number, text in enumerate(samples.texts(), start=1):
            print(f"---- {number} of {options.count} ----\n{escape(text.lstrip(chr(10)))}\n")
    else:
        stream = codec.stream()  # a chunk may end within a character of several bytes

        def show(tokens: np.ndarray) -> None:
            print(escape(stream.add(tokens[0])), end="", flush=True)

        if options.prompt is not None:
            show(codec.encode_text(options.prompt)[None])
        try:
            samples = generate_with(model, options, options.prompt, show, memory)
        finally:
            print(stream.finish(), flush=True)
    if options.out is not None:
        samples.save(options.out)


def generate_images(model: Any, options: Generate) -> Path:
    """Save a grid of images, or of completions below their originals; returns its path."""
    from memtrain.generation.generate import generate_with
    from memtrain.runs.run_folder import is_run
    from memtrain.training.console import drawing

    path, prompt, given = options.out, options.prompt, 0  # a text prompt is refused with a reason
    if path is not None and path.suffix.lower() != ".png":
        raise MemtrainError(f"out={path}: images are saved as PNG; end the name in .png")
    numbers = [str(model.spelling.class_number(label)) for label in options.label]
    originals = _originals(model, options)
    count = options.count or max(1, 64 // max(1, len(numbers)))
    if options.image is not None:
        count = options.count or 8
    if originals is not None:
        length = model.spelling.picture.length
        given = min(length - 1, max(1, round((options.given or 0.5) * length)))
        # After the token of the class, where images have one.
        prompt = originals[..., : given + originals.shape[-1] - length]
        count = count if originals.ndim == 1 else len(originals)
    count *= max(1, len(numbers))
    with drawing(count, model.spelling.picture.length - given) as listen:
        options = replace(options, count=count // max(1, len(numbers)))
        samples = generate_with(model, options, prompt, listen, _memory(options))
    if originals is not None:
        originals = np.broadcast_to(originals, (count, originals.shape[-1]))
    if path is None:
        folder = Path(options.run)
        kind = "image-" if options.image else "given-" if options.given else ""
        kind += f"label-{'-'.join(numbers)[:64]}-" if numbers else ""
        path = folder / "samples" if is_run(folder) else folder
        path = path / f"{kind}{count}-seed{options.seed}.png"
        refuse_links(path, folder)
    samples.save(path, originals)
    return path


def generate_forecasts(run: Any, options: Generate) -> Path:
    """Save forecasts from places in the held-out data; returns the path of the file."""
    from memtrain.evaluation.forecasts import default_horizon, held_out_cases
    from memtrain.generation.forecast import SUFFIXES, forecast_cases

    standard = Generate(run=options.run)
    for name in ("prompt", "given", "image", "memory", "label", "temperature", "top_k", "top_p"):
        if getattr(options, name) != getattr(standard, name):
            raise MemtrainError(
                f"--{name.replace('_', '-')}: this model forecasts numbers; --length, --count, "
                "--seed and --out are the options of forecasts"
            )
    path, horizon = options.out, options.length or default_horizon(run.task)
    if path is None:
        folder = Path(options.run)
        path = folder / "samples" / f"forecast-{horizon}-seed{options.seed}.png"
        refuse_links(path, folder)
    elif path.suffix.lower() not in SUFFIXES:
        raise MemtrainError(f"--out {path}: forecasts are saved as {', '.join(SUFFIXES)}")
    try:
        cases = held_out_cases(run.task, horizon, options.count or FORECASTS)
    except MemtrainError as error:
        raise MemtrainError(str(error).replace("horizon=", "--length ", 1)) from None
    forecast_cases(run, cases, count=PATHS, seed=options.seed).save(path)
    return path


def _originals(model: Any, options: Generate) -> np.ndarray | None:
    """Complete images whose first part will be the prompt, or the one of all, if any."""
    import torch

    if options.image is not None:
        return model.spelling.encode_image(options.image)
    if options.given is None:
        return None
    if not hasattr(model, "task"):
        raise MemtrainError("--given: a pretrained model holds no images; complete --image FILE")
    generator = torch.Generator().manual_seed(options.seed)
    images = model.task.held_out_images(options.count or 16, generator)
    if images is None:
        raise MemtrainError(
            "--given: the labels of this run do not cover whole images; complete --image FILE"
        )
    if options.count and len(images) < options.count:
        print(f"only {len(images)} images are held out", file=sys.stderr)
    return images.cpu().numpy()
