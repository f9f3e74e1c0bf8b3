"""Damaged files: the random changes of scripts/fuzz.py, and how the files are then used.

Each kind is created once in its own folder; a case copies it, changes one file and opens it as a
user would.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import random
import shutil
import signal
import zipfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from kill_test import tiny

from memtrain import cli
from memtrain.config import DataConfig, LogConfig, Stream
from memtrain.config.serialize import read_config, to_json
from memtrain.data.prepare import prepare_path
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, StoreMeta
from memtrain.data.store_reader import open_store
from memtrain.data.stream import StreamTask
from memtrain.errors import MemtrainError
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import load_rnn
from memtrain.runs.processes import Interrupted
from memtrain.training.console import Reporter
from memtrain.training.run import Run

EVIL = ("evil", "x", "antigravity")
"""Modules named by untrusted files, which must not be imported."""
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf")]
VALUES += ["", "x", "evil:Cell", "antigravity:X", "../../x", "a" * 5000, [], {}, [[[]]], {"x": 1}]


class Evil:
    """A pickle that would create a file when loaded."""

    def __reduce__(self):
        return os.system, ("touch /tmp/memtrain-fuzz-was-here",)


# ------------------------------------------------------------------------------------ mutations


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    kind = rng.randrange(8)
    if kind == 0 or not data:
        return pickle.dumps(Evil())
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 2:
        return bytes(data) + rng.randbytes(rng.randrange(1, 64))
    if kind == 3:
        first = rng.randrange(len(data))
        return bytes(data[:first] + rng.randbytes(8) + data[first:])
    if kind == 4:  # a length somewhere near the start becomes huge
        first = rng.randrange(min(len(data), 64))
        data[first : first + 8] = rng.choice([b"\xff" * 8, b"\x00" * 8, b"\xff" * 4])
        return bytes(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Change, add or remove values of an object; sometimes its bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(content, rng)
    plain = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = plain
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], (dict, list)) and rng.random() < 0.8:
                place = place[key]
                continue
            if rng.random() < 0.15:
                del place[key]
            elif rng.random() < 0.1 and isinstance(place, dict):
                place["unknown"] = deepcopy(rng.choice(VALUES))
            elif isinstance(place[key], int) and rng.random() < 0.4:
                place[key] = place[key] * rng.choice([-1, 2, 1000, 10**6]) + rng.choice([0, 1])
            else:
                place[key] = deepcopy(rng.choice(VALUES))
            break
    return json.dumps(plain).encode()


def mutate_lines(content: bytes, rng: random.Random) -> bytes:
    """Change the JSON of one line."""
    lines = content.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    lines[number] = mutate_json(lines[number], rng) + b"\n" * (rng.random() < 0.9)
    return b"".join(lines)


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file according to its suffix."""
    changes = {".json": mutate_json, ".jsonl": mutate_lines}
    change = changes.get(path.suffix, mutate_bytes)
    path.write_bytes(change(path.read_bytes(), rng))


# ---------------------------------------------------------------------------------------- cases


class StopSoon(Reporter):
    """Ends a run after its next step."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        signal.raise_signal(signal.SIGTERM)


def command(*arguments: object) -> None:
    """Run a memtrain command in this process.

    Raises:
        MemtrainError: it refused, with the message it printed.
        AssertionError: it ended in any other way.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
    message = err.getvalue()
    if status == 2 and "memtrain: " in message and "Traceback" not in message:
        raise MemtrainError(message[message.index("memtrain: ") :].strip())
    assert status == 0, f"status {status}: {message}"


def make_run(folder: Path, data: DataConfig | None = None) -> None:
    """Create a run that was stopped with a few steps left, and has two checkpoints."""
    config = tiny(3)
    config = replace(config, data=data or config.data)
    log = LogConfig(every=1, evaluate_every=0, evaluate_sequences=4, checkpoint_every=2)
    try:
        Run.create(replace(config, log=log), folder).train(StopSoon())
    except Interrupted:
        run = Run.open(folder)
        try:
            run.train(StopSoon())
        except Interrupted:
            return
    raise AssertionError("it was not stopped")


def fix_checksums(checkpoint: Path) -> None:
    """Update the checksums of a changed checkpoint, so that it is read."""
    try:
        state = json.loads((checkpoint / "state.json").read_bytes())
        for name in state["sha256"]:
            state["sha256"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        state.pop("progress_sha256", None)
        (checkpoint / "state.json").write_text(json.dumps(state))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return


def damage_run(source: Path, folder: Path, rng: random.Random) -> Path:
    """Copy a run and change one file; return its path."""
    shutil.copytree(source, folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    files = [folder / "config.json", folder / "metrics.jsonl", *sorted(newest.iterdir())]
    chosen = rng.choice(files)
    mutate(chosen, rng)
    if chosen.parent == newest and rng.random() < 0.5:
        fix_checksums(newest)
    if rng.random() < 0.5:  # nothing to fall back on
        for other in sorted((folder / "checkpoints").iterdir())[:-1]:
            shutil.rmtree(other)
    return chosen


def fuzz_run(source: Path, folder: Path, rng: random.Random) -> None:
    chosen = damage_run(source, folder, rng)
    run = Run.open(folder)
    run.metrics.read()
    affordable = all(stage.steps <= 10 for stage in run.config.stages().values())
    if chosen.name != "config.json" and affordable:
        try:
            run.train(StopSoon())
        except Interrupted:
            return


def fuzz_writer(source: Path, folder: Path, rng: random.Random) -> None:
    damage_run(source, folder, rng)
    generate(load_rnn(folder), count=2).save(folder / "written.png")


def make_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(to_json(tiny(3)))


def fuzz_config(source: Path, folder: Path, rng: random.Random) -> None:
    shutil.copytree(source, folder)
    mutate(folder / "config.json", rng)
    config = read_config(folder / "config.json")
    if ":" in config.cell.kind or config.data.kind == "custom":  # named by the file alone
        command("train", folder / "config.json", "--folder", folder / "run")
        raise AssertionError("a class that a received config names was accepted silently")
    Run.create(config, folder / "run")


def make_store(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 600)
    starts = np.arange(0, 600, 50)
    split = Split(tokens, starts)
    meta = StoreMeta(name="fuzz", vocab_size=9, source="random")
    write_store(folder, meta, {"train": split, "test": split})


def fuzz_store(source: Path, folder: Path, rng: random.Random) -> None:
    shutil.copytree(source, folder)
    mutate(rng.choice(sorted(folder.iterdir())), rng)
    store = open_store(folder, verify=rng.random() < 0.5)
    config = Stream(cross_documents=rng.random() < 0.5, document_starts=1.0)
    task = StreamTask(store, config, 16, empty_start_rows=1)
    batch = task.sample(2, torch.Generator().manual_seed(0))
    assert int(batch.inputs.max()) < task.vocab_size, "a token is outside the vocabulary"
    task.held_out(2, torch.Generator().manual_seed(0))


def make_files(folder: Path) -> None:
    """Create one raw file of each kind that `memtrain data` accepts."""
    from PIL import Image

    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (6, 9, 8), dtype=np.uint8)
    packings = {
        "pictures": zipfile.ZIP_DEFLATED,
        "lzma": zipfile.ZIP_LZMA,
        "bz2": zipfile.ZIP_BZIP2,
    }
    for name, packing in packings.items():
        with zipfile.ZipFile(folder / f"{name}.zip", "w", packing) as archive:
            for number, gray in enumerate(noise):
                stream = io.BytesIO()
                Image.fromarray(gray).save(stream, "PNG" if number % 2 else "JPEG")
                archive.writestr(f"{number}.{'png' if number % 2 else 'jpg'}", stream.getvalue())
    np.save(folder / "tokens.npy", noise.reshape(6, -1).astype(np.int32))
    text = b"It was a dark and stormy night. " * 40
    (folder / "text.txt").write_bytes(text)
    (folder / "text.txt.gz").write_bytes(gzip.compress(text))
    (folder / "text.txt.bz2").write_bytes(bz2.compress(text))
    (folder / "text.txt.xz").write_bytes(lzma.compress(text))
    rows = [{"text": f"It was night {number}. " * 8} for number in range(20)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.json").write_text(json.dumps(rows))
    (folder / "text.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / "text.parquet")


def fuzz_file(source: Path, folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    name = rng.choice(sorted(path.name for path in source.iterdir()))
    shutil.copy(source / name, folder / name)
    mutate(folder / name, rng)
    prepare_path(folder / name, folder / "out")
