"""memtrain data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError, did_you_mean, printable


@dataclass(frozen=True)
class _DataOptions:
    """List tasks and data sets; show samples of a task; or prepare real data for training: mnist,
    tinystories, sketchy, or your own files (text, JSONL, CSV, parquet, a folder or zip of images,
    a .npy of tokens or images)."""

    name: tyro.conf.Positional[str] = ""
    """A task, a data set, or a path (default: list them all)."""
    count: int = 2
    """Samples of a task to show."""
    seed: int = 0
    """The same seed gives the same samples."""
    data_dir: Path | None = None
    """Folder with the files of a data set (default: download them)."""
    out: Path | None = None
    """Folder for the prepared data (default: data/NAME for a data set, data/NAME-KEY for your own
    files; the key changes with the content and the options)."""
    overwrite: bool = False
    """Replace the prepared data that is there."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the preparation, as pairs of a name and a value: --option size 28 levels 16. For
    all your own files: held_out, the fraction for evaluation (0.1). For text: mode (bytes; or
    ascii, which drops all other characters), separator (true puts token 0 between documents),
    column, which holds the documents of JSONL, CSV and parquet (text). For images: size to resize
    to, colour (true keeps colours, as the nearest of a palette), levels of grey (256) or colours
    of the palette (64), labels (true begins each image with its class, the name of its folder; or
    a file of labels), patch, the side of the squares that make a token (1), threshold, below which
    a pixel is ink (with levels 2), mirror (true adds mirrored images), shift, the largest shift of
    added copies in pixels (0). For mnist: size, levels, patch, labels. For a .npy of tokens:
    vocab_size."""


def data(arguments: list[str]) -> int:
    """List the tasks and data sets, show samples of a task, or prepare real data."""
    options = parse(_DataOptions, arguments, "memtrain data")

    from memtrain.recipes import RECIPES

    tasks = {make().data.kind: make().data for make in RECIPES.values()}
    tasks = {
        name: task
        for name, task in tasks.items()
        if name not in ("stream", "labels", "series", "custom")
    }
    if not options.name:
        print("Tasks, generated during training (`memtrain data NAME` shows samples):")
        for name, config in tasks.items():
            print(f"  {name:<14}{(type(config).__doc__ or '').splitlines()[0]}")
        print("\nData sets (`memtrain data NAME --data-dir FOLDER` prepares them once):")
        for name in ("mnist", "tinystories", "sketchy"):
            print(f"  {name:<14}{(RECIPES[name].__doc__ or '').split(' (')[0]}")
        print("\nYour own files: memtrain data PATH, for text, images or a .npy.")
        print("Numbers over time are read directly: memtrain train series --data FILE.")
        return 0
    if options.name in tasks:
        return _show_samples(options.name, tasks[options.name], options.count, options.seed)
    return _prepare(options, tasks)


def _show_samples(name: str, config: Any, count: int, seed: int) -> int:
    if count < 1:
        raise MemtrainError(f"count={count}: must be at least 1")
    if not 0 <= seed < 2**63:
        raise MemtrainError(f"seed={seed}: must be at least 0 and below 2**63")

    import torch

    from memtrain.data.task import build_task

    task = build_task(config)
    batch = task.sample(count, torch.Generator().manual_seed(seed))
    print(f"{name}: {task.sequence_length} tokens of {task.vocab_size}\n")
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        print(task.describe(inputs, targets), end="\n\n")
    return 0


def _prepare(options: Any, tasks: dict[str, Any]) -> int:
    from memtrain.data.prepare import DATA_SETS, prepare, prepare_path
    from memtrain.data.prepare.cache import prepare_source, source_path

    name, out = options.name, options.out
    if name in DATA_SETS:
        out = out or Path("data") / name
        flags = {"data_dir": options.data_dir, "overwrite": options.overwrite}
        store = prepare(name, out=out, **flags, **options.option)
    else:
        if name == "series" and not Path(name).exists():
            raise MemtrainError(
                "data 'series': is read directly, there is nothing to prepare: memtrain train "
                "series --data FILE, a CSV, parquet or .npy"
            )
        if not Path(name).exists() and not {*"/.~"} & {*name}:  # a misspelled name, not a path
            known = did_you_mean(name, [*tasks, *DATA_SETS])
            raise MemtrainError(f"data {name!r}: no such file; {known}")
        path = source_path(Path(name))
        if (path / "meta.json").is_file():
            raise MemtrainError(
                f"{path}: is prepared already; train on it: memtrain train ... --data {path}"
            )
        if out is not None:
            store = prepare_path(path, out, overwrite=options.overwrite, **options.option)
        else:
            store, _ = prepare_source(path, options.option, Path("data"))
            out = store.folder
        name = "text" if store.meta.text else "images" if store.meta.picture else "tokens"
    for split, info in store.splits.items():
        documents = "1 document" if info.documents == 1 else f"{info.documents:,} documents"
        print(f"{split:<6}{info.tokens:>14,} tokens in {documents}")
    for note in store.meta.notes:
        print(printable(f"note  {note}"))
    print(f"prepared {out}; learn it with: memtrain train {name} --data {out}")
    return 0
