"""Hostile folders: files that scripts/fuzz.py replaces, and how the folders are then used.

- links: a file or folder of a run, a store or a reproduced figure is a symbolic link to something
  outside, which must be unchanged afterwards, with nothing added;
- pipes: a named pipe, an endless device, a socket, a folder or a link to itself replaces a file:
  it is refused with a reason, and nothing waits for it;
- bombs: a few kilobytes that claim to be gigabytes;
- reproduce: setup.json and results.jsonl, damaged.
"""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_damage import EVIL, StopSoon, command, make_run, make_store, mutate

from memtrain.config import Digits, Stream
from memtrain.data.prepare import prepare_path
from memtrain.data.store_reader import open_store
from memtrain.data.stream import StreamTask
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import load_rnn
from memtrain.paper import load
from memtrain.paper.base import Result, Setup
from memtrain.paper.reproduce import open_folder
from memtrain.runs.processes import Interrupted
from memtrain.training.run import Run

TO_COME = {
    "run": "figures figures/evaluation-64.png figures/evaluation-64.json figures/training.png "
    "samples .draft-config.json checkpoints/.draft-00000003 run.json .lock",
    "store": "options.json .lock .draft-meta.json source.json",
    "reproduce": "report.html figures figures/joint.png setup.draft sweep.lock runs",
    "raw": "._2.png more more/7.png",
}
"""Names that a command may write to each folder, or read from it."""
HUGE = 3 * 2**30
"""Bytes of a sparse file."""

# ------------------------------------------------------------------------- folders, and their use


def make_folders(folder: Path) -> None:
    """Create one of each kind of folder that a user may receive."""
    folder.mkdir()
    make_run(folder / "run", data=Digits())
    make_store(folder / "store")
    make_reproduced(folder / "reproduce")
    make_raw(folder / "raw")


def make_reproduced(folder: Path) -> None:
    """Create a folder like `memtrain reproduce joint` does, with invented numbers."""
    folder.mkdir()
    setup = {"scale": "smoke", "data_dir": "data", "device": "cpu", "figures": ["joint"]}
    (folder / "setup.json").write_text(json.dumps(setup))
    figure = load("joint")
    cost = {"steps": 12, "tokens": 3072, "sequential_ops": 1368, "seconds": 0.5}
    scores = {"rnn_nats": 2.2, "rnn_accuracy": 0.1, "teacher_nats": 2.1, "teacher_accuracy": 0.2}
    lines = [
        Result(
            figure=figure.name,
            version=figure.version,
            job=job.name,
            key=job.key,
            tags=dict(job.tags),
            measured=scores | {"smt_nats": 2.2, "smt_accuracy": 0.1},
            cost=cost,
            curve=[cost | {"stage": "smt", "steps": 12 * n} | scores for n in (1, 2)],
        )
        for job in figure.grid(Setup(folder=folder, device="cpu"))
    ]
    text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
    (folder / "results.jsonl").write_text(text)


def make_raw(folder: Path) -> None:
    """Create images, and a folder of texts."""
    from PIL import Image

    folder.mkdir()
    for number in range(4):
        Image.new("L", (6, 5), 40 * number).save(folder / f"{number}.png")
    (folder / "texts").mkdir()
    for number in range(3):
        (folder / "texts" / f"{number}.txt").write_text(f"story {number}\n" * 20)


def use_run(folder: Path, rng: random.Random) -> None:
    """Open, continue for a step, evaluate, generate, or train in a run's folder."""
    what = rng.choice(["open", "resume", "resume", "eval", "generate", "overwrite"])
    if what == "open":
        Run.open(folder).metrics.read()
    elif what == "resume":
        with contextlib.suppress(Interrupted):
            Run.open(folder).train(StopSoon())
    elif what == "eval":
        command("eval", folder, "--sequences", "2")
    elif what == "generate":
        generate(load_rnn(folder), count=1, length=64)
        command("generate", folder, "--count", "1")
    else:
        command("train", folder / "config.json", "--folder", folder, "--overwrite")


def use_store(folder: Path, rng: random.Random) -> None:
    """Learn from a store, or replace it."""
    if rng.random() < 0.7:
        task = StreamTask(open_store(folder), Stream(document_starts=1.0), 16, empty_start_rows=1)
        task.sample(2, torch.Generator().manual_seed(0))
        task.held_out(2, torch.Generator().manual_seed(0))
    else:
        text = folder.parent / "new.txt"
        text.write_text("something else entirely\n" * 20)
        prepare_path(text, folder, overwrite=True)


def use_reproduced(folder: Path, rng: random.Random) -> None:
    """Open the results, draw and judge them, or write the report."""
    what = rng.choice(["open", "draw", "report", "report elsewhere"])
    if what == "open":
        open_folder(folder)
    elif what == "draw":
        settings = ["--scale", "smoke", "--device", "cpu", "--minutes", "0", "--no-mps"]
        command("reproduce", "joint", "--folder", folder, *settings)
    elif what == "report":
        command("report", folder)
    else:
        command("report", folder, "--out", folder / "page.html")


def use_raw(folder: Path, rng: random.Random) -> None:
    """Prepare images or texts."""
    path = folder if rng.random() < 0.5 else folder / "texts"
    prepare_path(path, folder.parent / "out")


USES: dict[str, Callable[[Path, random.Random], None]] = {
    "run": use_run,
    "store": use_store,
    "reproduce": use_reproduced,
    "raw": use_raw,
}


def received(source: Path, folder: Path, rng: random.Random) -> tuple[str, Path]:
    """Copy one of the folders; return its kind and path."""
    kind = rng.choices(list(USES), (5, 2, 1, 1))[0]
    shutil.copytree(source / kind, folder / kind)
    return kind, folder / kind


def victim(kind: str, place: Path, rng: random.Random, share: float) -> Path:
    """Remove an entry of a folder and return its path; a fraction are names still to be written."""
    there = sorted(place.rglob("*"))
    new = [place / name for name in TO_COME[kind].split()]
    chosen = rng.choice(new if rng.random() < share else there)
    chosen.parent.mkdir(parents=True, exist_ok=True)
    if chosen.is_dir():
        shutil.rmtree(chosen)
    else:
        chosen.unlink(missing_ok=True)
    return chosen


# ---------------------------------------------------------------------------------------- links


@contextlib.contextmanager
def untouched(outside: Path) -> Iterator[None]:
    """Fail if anything outside has changed, disappeared or been added."""
    before = snapshot(outside)
    try:
        yield
    finally:
        after = snapshot(outside)
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        assert not changed, f"outside of the folder, {changed} changed"


def snapshot(folder: Path) -> dict[str, object]:
    """The exact contents of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else path.is_dir()
        for path in sorted(folder.rglob("*"))
    }


def fuzz_links(source: Path, folder: Path, rng: random.Random) -> None:
    outside = folder / "outside"
    (outside / "holiday" / "00000001").mkdir(parents=True)
    (outside / "holiday" / "00000001" / "photo.jpg").write_bytes(b"a photo")
    (outside / "holiday" / ".draft-mine").mkdir()
    (outside / "holiday" / ".draft-mine" / "thesis.txt").write_bytes(b"a thesis")
    (outside / "diary.txt").write_bytes(b"Dear diary,\n" * 500)
    kind, place = received(source, folder, rng)
    kept = folder / "kept"
    shutil.copytree(place, kept)
    chosen = victim(kind, place, rng, 0.4)
    same = kept / chosen.relative_to(place)
    if same.exists() and rng.random() < 0.4:  # a link to the original
        target = outside / "moved"
        same.rename(target)
    else:
        target = outside / rng.choice(["diary.txt", "holiday", "holiday", "new", "holiday/new"])
    shutil.rmtree(kept)
    chosen.symlink_to(target if rng.random() < 0.7 else os.path.relpath(target, chosen.parent))
    with untouched(outside):
        USES[kind](place, rng)


# ---------------------------------------------------------------------------------------- pipes


def fuzz_pipes(source: Path, folder: Path, rng: random.Random) -> None:
    kind, place = received(source, folder, rng)
    chosen = victim(kind, place, rng, 0.2)
    what = rng.choice(["pipe", "pipe", "zero", "socket", "folder", "loop"])
    if what == "pipe":
        os.mkfifo(chosen)
    elif what == "zero":
        chosen.symlink_to("/dev/zero")
    elif what == "socket":
        here = os.open(chosen.parent, os.O_RDONLY)  # the path of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(f"/proc/self/fd/{here}/{chosen.name}")
        finally:
            os.close(here)
    elif what == "folder":
        chosen.mkdir()
        (chosen / "inside").write_text("something")
    else:
        chosen.symlink_to(chosen)
    USES[kind](place, rng)


# ---------------------------------------------------------------------------------------- bombs


def black_png(side: int) -> bytes:
    """A black image of one bit per pixel: 64 megapixels take 8 kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def make_bombs(folder: Path) -> None:
    make_folders(folder)
    raw = folder / "bombs"
    raw.mkdir()
    png = black_png(8192)
    with zipfile.ZipFile(raw / "pixels.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(60):
            archive.writestr(f"{number}.png", png)
    with zipfile.ZipFile(raw / "entries.zip", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("0.png", png)
        archive.filelist.extend(archive.filelist * 299)
    (raw / "pictures").mkdir()
    for number in range(40):
        (raw / "pictures" / f"{number}.png").write_bytes(png)
    (raw / "texts").mkdir()
    packed = gzip.compress(bytes(60 * 2**20), 9)
    for number in range(40):
        (raw / "texts" / f"{number}.txt.gz").write_bytes(packed)
    (raw / "one.txt.gz").write_bytes(packed * 40)  # several members in one file
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        words = pyarrow.DictionaryArray.from_arrays(np.zeros(4000, np.int32), ["a" * 500_000])
        pyarrow.parquet.write_table(
            pyarrow.table({"text": words}), raw / "words.parquet", store_schema=False
        )
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(  # a header without data
        stream, {"descr": "<i8", "fortran_order": False, "shape": (2**29,)}
    )
    (raw / "tokens.npy").write_bytes(stream.getvalue())


def fuzz_bombs(source: Path, folder: Path, rng: random.Random) -> None:
    """Prepare a raw file that unpacks to gigabytes, or use a folder with a huge file."""
    folder.mkdir()
    names = [*sorted(path.name for path in (source / "bombs").iterdir()), "sparse.txt"]
    if rng.random() < 0.4:
        path = folder / rng.choice(names)
        original = source / "bombs" / path.name
        if original.is_dir():
            shutil.copytree(original, path)
        elif original.exists():
            shutil.copy(original, path)
        if path.suffix in (".npy", ".txt"):
            path.touch()
            os.truncate(path, HUGE)
        pictures = path.name in ("pixels.zip", "entries.zip", "pictures")
        options: dict[str, Any] = {"size": 8} if pictures and rng.random() < 0.5 else {}
        prepare_path(path, folder / "out", **options)
        return
    kind, place = received(source, folder, rng)
    files = [path for path in sorted(place.rglob("*.json*")) if path.is_file()]
    chosen = rng.choice(files or sorted(place.rglob("*.txt")))
    what = rng.choice(["sparse", "deep", "digits", "wide"])
    if what == "sparse":
        os.truncate(chosen, HUGE)
    else:
        inside = {"deep": "[" * 100_000, "digits": "1" * 500_000, "wide": "[{}," * 200_000}[what]
        chosen.write_text('{"figures": ' + inside)
    USES[kind](place, rng)


# ------------------------------------------------------------------------------------ reproduce


def fuzz_reproduced(source: Path, folder: Path, rng: random.Random) -> None:
    """Damage one of the two files, or name a foreign figure."""
    shutil.copytree(source, folder)
    if rng.random() < 0.15:
        setup = json.loads((folder / "setup.json").read_text())
        setup["figures"] = [f"{rng.choice(EVIL)}:Figure"]
        (folder / "setup.json").write_text(json.dumps(setup))
    else:
        mutate(folder / rng.choice(["setup.json", "results.jsonl"]), rng)
    use_reproduced(folder, rng)
