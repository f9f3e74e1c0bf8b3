"""memtrain data."""

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from memtrain.cli.args import help_width, parse
from memtrain.errors import MemtrainError, did_you_mean, printable

SETS = ("mnist", "tinystories", "enwik8", "sketchy")


@dataclass(frozen=True)
class _DataOptions:
    """List tasks and data sets; show samples of a task; or prepare real data for training: mnist,
    tinystories, enwik8, sketchy, or your own files (text, JSONL, CSV, parquet, Arrow, a folder of
    them, a Hugging Face dataset, a folder or zip of images, a .npy of images or tokens, nanoGPT's
    train.bin and val.bin)."""

    name: tyro.conf.Positional[tuple[str, ...]] = ()
    """A task, a data set, a path, or several paths of texts (default: list them all)."""
    count: int = 2
    """Samples of a task to show."""
    seed: int = 0
    """The same seed gives the same samples."""
    data_dir: Path | None = None
    """Folder with the files of a data set, or the file enwik8.gz (default: download them)."""
    out: Path | None = None
    """Folder for the prepared data (default: data/NAME for a data set, data/NAME-KEY for your own
    files; the key changes with the content and the options)."""
    overwrite: bool = False
    """Replace the prepared data that is there."""
    option: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the preparation, as pairs of a name and a value: --option size 28 levels 16. For
    all your own files: held_out, the fraction for evaluation (0.1). The others are below."""


OPTIONS = {
    "text": {
        "mode bytes|ascii": "every byte is a token [bytes]; or drop all but ASCII characters: "
        "--option mode ascii",
        "tokenizer bpe|FILE": "train a byte-level BPE on the training part, or take a "
        "tokenizer.json [bytes are tokens]: --option tokenizer bpe",
        "vocab N": "the most tokens of the BPE [4096]: --option tokenizer bpe vocab 8192",
        "separator true|false": "a token between documents: 0, or the tokenizer's <|endoftext|> "
        "[false]: --option separator true",
        "divider TEXT": "a line that ends a document of plain text, beside <|endoftext|>: "
        "--option divider '***'",
        "column NAME": "the documents of JSONL, CSV, parquet, Arrow and datasets [text]: "
        "--option column body",
        "split NAME": "of a Hugging Face dataset [train]: --option split validation",
        "subset NAME": "of a dataset on the Hub that has several: --option subset "
        "wikitext-2-raw-v1",
        "held_out X": "the last documents, or the end of a single one [0.1]: --option held_out "
        "0.05",
    },
    "tokens": {
        "vocab_size N": "the number of different tokens [the tokenizer's, or the highest + 1]: "
        "--option vocab_size 50257",
        "tokenizer FILE": "the tokenizer.json that made the tokens, so that they are read as "
        "text: --option tokenizer gpt2/tokenizer.json",
        "held_out X": "the last documents, or the end of a stream [0.1]; nanoGPT's val.bin is "
        "held out as it is: --option held_out 0.05",
    },
    "images": {
        "size N": "resize to N x N pixels: --option size 28",
        "colour true|false": "keep colours, as the nearest of a palette [false]: --option colour "
        "true",
        "levels N": "of grey [256], or colours of the palette [64]: --option levels 16",
        "patch N": "side of the squares of pixels that make a token, 1 to 4; grey [1]: --option "
        "patch 2",
        "threshold N": "with levels 2, darker pixels are ink [128]: --option levels 2 "
        "threshold 192",
        "labels true|FILE": "begin each image with its class, the name of its folder, or from a "
        "file: --option labels true",
        "mirror true|false": "add mirrored images to train [false]: --option mirror true",
        "shift N": "the largest shift of added copies, in pixels [0]: --option shift 1",
        "held_out X": "share of the images in test, by name [0.1]: --option held_out 0.05",
    },
    "mnist": {
        "size N": "resize to N x N pixels: --option size 14",
        "levels N": "of grey [256]: --option levels 4",
        "patch N": "side of the squares of pixels that make a token [1]: --option patch 2",
        "labels true|false": "begin each image with its digit [false]: --option labels true",
    },
    "enwik8": {
        "held_out validation|test": "which of the two parts of 5 million bytes [validation]: "
        "--option held_out test",
    },
}
"""The options of preparations, with their values, defaults in brackets, and an example."""


def _describe_options() -> str:
    lines: list[str] = []
    width = help_width() - 28
    for kind, options in OPTIONS.items():
        lines += [f"\n--option, for {kind}" if lines else f"--option, for {kind}"]
        for usage, text in options.items():
            first, *rest = textwrap.wrap(text, width, break_on_hyphens=False)
            lines += [f"  {usage:<25} {first}", *(" " * 28 + line for line in rest)]
    return "\n".join(lines)


def data(arguments: list[str]) -> int:
    """List the tasks and data sets, show samples of a task, or prepare real data."""
    options = parse(_DataOptions, arguments, "memtrain data", footer=_describe_options())

    from memtrain.recipes import RECIPES

    tasks = {make().data.kind: make().data for make in RECIPES.values()}
    tasks = {
        name: task
        for name, task in tasks.items()
        if name not in ("stream", "labels", "series", "custom")
    }
    if not options.name:
        _check_used(options)
        width = max(map(len, [*tasks, *SETS])) + 2
        print("Tasks, generated during training (`memtrain data NAME` shows samples):")
        for name, config in tasks.items():
            print(f"  {name:<{width}}{(type(config).__doc__ or '').splitlines()[0]}")
        print("\nData sets (`memtrain data NAME --data-dir FOLDER` prepares them once):")
        for name in SETS:
            print(f"  {name:<{width}}{(RECIPES[name].__doc__ or '').split(' (')[0]}")
        print("\nYour own files: memtrain data PATH, for text, images or tokens (.npy, nanoGPT);")
        print("memtrain data --help lists the options.")
        print("Numbers over time are read directly: memtrain train series --data FILE.")
        return 0
    name, *others = options.name
    if others and name in (*tasks, *SETS):
        raise MemtrainError(f"{others[0]!r}: only paths are joined; name {name} alone")
    if name in tasks:
        _check_used(options, "a task")
        return _show_samples(name, tasks[name], options.count, options.seed)
    return _prepare(options, tasks)


USED_BY = {
    "count": "a task",
    "seed": "a task",
    "data_dir": "a data set",
    "out": "data that is prepared",
    "overwrite": "data that is prepared",
    "option": "data that is prepared",
}
"""What each option is for."""


def _check_used(options: _DataOptions, *kinds: str) -> None:
    """Refuse options that are for other kinds than what is named."""
    for name, kind in USED_BY.items():
        if kind not in kinds and getattr(options, name) != getattr(_DataOptions(), name):
            named = f"{options.name[0]} is none" if options.name else "none is named"
            raise MemtrainError(
                f"--{name.replace('_', '-')}: is for {kind}, and {named}; leave it out"
            )


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
    from memtrain.data.prepare import prepare, prepare_path
    from memtrain.data.prepare.cache import prepare_source

    name, out = options.name[0], options.out
    if name in SETS:
        _check_used(options, "a data set", "data that is prepared")
        out = out or Path("data") / name
        flags = {"data_dir": options.data_dir, "overwrite": options.overwrite}
        store = prepare(name, out=out, **flags, **options.option)
    else:
        paths = [_checked_path(one, tasks) for one in options.name]
        _check_used(options, "data that is prepared")
        if out is not None:
            path = paths[0] if len(paths) == 1 else paths
            store = prepare_path(path, out, overwrite=options.overwrite, **options.option)
        else:
            store, _ = prepare_source(paths, options.option, Path("data"))
            out = store.folder
        name = "text" if store.meta.text else "images" if store.meta.picture else "tokens"
    for split, info in store.splits.items():
        documents = "1 document" if info.documents == 1 else f"{info.documents:,} documents"
        print(f"{split:<6}{info.tokens:>14,} tokens in {documents}")
    for note in store.meta.notes:
        print(printable(f"note  {note}"))
    print(f"prepared {out}; learn it with: memtrain train {name} --data {out}")
    return 0


def _checked_path(name: str, tasks: dict[str, Any]) -> Path:
    """The path of the user's data; refuse what is none, and what is prepared already."""
    from memtrain.data.prepare.cache import source_path

    if name == "series" and not Path(name).exists():
        raise MemtrainError(
            "data 'series': is read directly, there is nothing to prepare: memtrain train "
            "series --data FILE, a CSV, parquet or .npy"
        )
    if not Path(name).exists() and not {*"/.~:"} & {*name}:  # a misspelled name, not a path
        known = did_you_mean(name, [*tasks, *SETS])
        raise MemtrainError(f"data {name!r}: no such file; {known}")
    path = source_path(Path(name))
    if (path / "meta.json").is_file():
        raise MemtrainError(
            f"{path}: is prepared already; train on it: memtrain train ... --data {path}"
        )
    return path
