"""memtrain remember."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from memtrain.cli.args import command_name, parse
from memtrain.errors import MemtrainError


@dataclass(frozen=True, kw_only=True)
class _RememberOptions:
    """Read texts, an image or tokens with the recurrent network of a run, and write its memory to a
    file of a few kilobytes. memtrain generate RUN --memory FILE continues from there at once, as
    if all of it had been the prompt; memtrain.Memory loads, averages and compares such files in
    Python. Texts may have any length: the time grows with it, the memory use does not."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    files: tyro.conf.Positional[tuple[Path, ...]]
    """What to read, one after another: texts; an image, if the model draws images; token numbers
    separated by spaces, or a .npy of tokens."""
    out: Path | None = None
    """The memory file to write; also -o."""
    memory: Path | None = None
    """Continue from this memory file instead of the empty memory."""
    label: str | None = None
    """The class of the image, by name or number, if the model's images have classes."""
    skip_unknown: bool = False
    """Leave out characters that do not occur in the training text, which are refused otherwise."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell class that the run's config names."""

    def __post_init__(self) -> None:
        if not self.files:
            raise MemtrainError("FILES: name what to read: memtrain remember RUN FILE -o OUT")
        if self.out is None:
            raise MemtrainError("out: name the memory file to write: -o OUT")
        if self.out.is_dir():
            raise MemtrainError(f"out={self.out}: is a folder; name a file in it")


def remember(arguments: list[str]) -> int:
    """Read files with a network and write its memory."""
    arguments = ["--out" if one == "-o" else one for one in arguments]
    options = parse(_RememberOptions, arguments, "memtrain remember")
    out = options.out
    assert out is not None

    from memtrain.generation.memory import Memory
    from memtrain.generation.pretrained import open_model
    from memtrain.generation.remember import remember
    from memtrain.training.console import make_reporter

    model = open_model(
        options.run, best=options.best, allow_code=options.allow_code, reporter=make_reporter()
    )
    before = None if options.memory is None else Memory.load(options.memory)
    with _progress() as report:
        memory = remember(
            model,
            options.files,
            memory=before,
            label=options.label,
            skip_unknown=options.skip_unknown,
            report=report,
        )
    memory.save(out)
    size = out.stat().st_size / 2**10
    shape = " x ".join(map(str, memory.values.shape))
    print(f"{out}: {memory.card.tokens:,} tokens read, memory {shape}, {size:,.1f} KiB")
    if memory.card.left_out:
        print(f"left out  {memory.card.left_out:,} characters that the training text does not have")
    if memory.card.kind != "image":
        run, path = shlex.quote(options.run), shlex.quote(str(out))
        print(f"continue from it  {command_name()} generate {run} --memory {path}")
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many tokens have been read."""
    from memtrain.training.console import make_reporter

    reporter, begun = make_reporter(transient=True), False

    def report(read: int, total: int) -> None:
        nonlocal begun
        if not begun:
            reporter.stage("reading", 0, total)
        begun = True
        if read < total:
            reporter.advance(read, {})

    try:
        yield report
    finally:
        reporter.close()
