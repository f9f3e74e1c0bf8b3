"""Damage files at random, thousands of times, and see that each is taken or refused in words.

    python scripts/fuzz.py --cases 10000

A case is a copy of a run folder, a prepared data set or a raw data file in which one file was
changed: bytes flipped, cut, doubled or replaced, JSON values swapped for others, a pickle put in
its place; half of the changed checkpoints get fitting checksums, so that what lies behind the
checksums is reached too. It is then opened as a user would, and a resumed run trains a step. A case
fails if anything but a MemtrainError comes out, if it takes too long, if it takes too much memory,
if a pickle is opened, a module named by a file is imported, a process is started, or a file outside
the case's folder is written, and if a refusal is empty or longer than a few lines.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from kill_test import tiny

from memtrain.config import DataConfig, Digits, LogConfig, Stream
from memtrain.config_json import read_config, to_json
from memtrain.data.sources import prepare_path
from memtrain.data.store import Split, StoreMeta, open_store, write_store
from memtrain.data.stream import StreamTask
from memtrain.errors import MemtrainError
from memtrain.pretrained import load_rnn
from memtrain.run import Run
from memtrain.train.reporter import Reporter
from memtrain.train.stop import Interrupted
from memtrain.writer import generate

SECONDS = 20.0
"""A case that takes longer hangs."""
LINES = 5
"""A refusal has fewer."""
MEGABYTES = 1024
"""A case may take this much address space more than there was before."""
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf")]
VALUES += ["", "x", "evil:Cell", "../../x", "a" * 5000, [], {}, [[[]]], {"x": 1}]


class Hang(BaseException):
    """A case ran past its time."""


class Evil:
    """A pickle that would leave a mark."""

    def __reduce__(self):
        return os.system, ("touch /tmp/memtrain-fuzz-was-here",)


# ------------------------------------------------------------------------------------ mutations


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    kind = chance.randrange(8)
    if kind == 0 or not data:
        return pickle.dumps(Evil())
    if kind == 1:
        return bytes(data[: chance.randrange(len(data))])
    if kind == 2:
        return bytes(data) + chance.randbytes(chance.randrange(1, 64))
    if kind == 3:
        first = chance.randrange(len(data))
        return bytes(data[:first] + chance.randbytes(8) + data[first:])
    if kind == 4:  # a length somewhere near the start becomes huge
        first = chance.randrange(min(len(data), 64))
        data[first : first + 8] = chance.choice([b"\xff" * 8, b"\x00" * 8, b"\xff" * 4])
        return bytes(data)
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def mutate_json(content: bytes, chance: random.Random) -> bytes:
    """Change, add or remove values of an object; sometimes its bytes."""
    if chance.random() < 0.25:
        return mutate_bytes(content, chance)
    plain = json.loads(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        place = plain
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(place[key], (dict, list)) and chance.random() < 0.8:
                place = place[key]
                continue
            if chance.random() < 0.15:
                del place[key]
            elif chance.random() < 0.1 and isinstance(place, dict):
                place["unknown"] = deepcopy(chance.choice(VALUES))
            elif isinstance(place[key], int) and chance.random() < 0.4:
                place[key] = place[key] * chance.choice([-1, 2, 1000, 10**6]) + chance.choice(
                    [0, 1]
                )
            else:
                place[key] = deepcopy(chance.choice(VALUES))
            break
    return json.dumps(plain).encode()


def mutate(path: Path, chance: random.Random) -> None:
    change = mutate_json if path.suffix == ".json" else mutate_bytes
    path.write_bytes(change(path.read_bytes(), chance))


# ---------------------------------------------------------------------------------------- cases


class StopSoon(Reporter):
    def advance(self, step: int, metrics: dict[str, float]) -> None:
        signal.raise_signal(signal.SIGTERM)


def make_run(folder: Path, data: DataConfig | None = None) -> None:
    """A run that was stopped with a few steps left, and has two checkpoints."""
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
    """As one would who wants a changed file to be read."""
    try:
        state = json.loads((checkpoint / "state.json").read_bytes())
        for name in state["sha256"]:
            state["sha256"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        state.pop("progress_sha256", None)
        (checkpoint / "state.json").write_text(json.dumps(state))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return


def damage_run(source: Path, folder: Path, chance: random.Random) -> Path:
    """A copy of a run with one file changed: which one."""
    shutil.copytree(source, folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    files = [folder / "config.json", folder / "metrics.jsonl", *sorted(newest.iterdir())]
    chosen = chance.choice(files)
    mutate(chosen, chance)
    if chosen.parent == newest and chance.random() < 0.5:
        fix_checksums(newest)
    if chance.random() < 0.5:  # nothing to fall back on
        for other in sorted((folder / "checkpoints").iterdir())[:-1]:
            shutil.rmtree(other)
    return chosen


def fuzz_run(source: Path, folder: Path, chance: random.Random) -> None:
    chosen = damage_run(source, folder, chance)
    run = Run.open(folder)
    run.metrics.read()
    affordable = all(stage.steps <= 10 for stage in run.config.stages().values())
    if chosen.name != "config.json" and affordable:
        try:
            run.train(StopSoon())
        except Interrupted:
            return


def fuzz_writer(source: Path, folder: Path, chance: random.Random) -> None:
    damage_run(source, folder, chance)
    generate(load_rnn(folder), count=2).save(folder / "written.png")


def make_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(to_json(tiny(3)))


def fuzz_config(source: Path, folder: Path, chance: random.Random) -> None:
    shutil.copytree(source, folder)
    mutate(folder / "config.json", chance)
    config = read_config(folder / "config.json")
    if ":" not in config.cell.kind and config.data.kind != "custom":  # what a user names is run
        Run.create(config, folder / "run")


def make_store(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 600)
    starts = np.arange(0, 600, 50)
    split = Split(tokens, starts)
    meta = StoreMeta(name="fuzz", vocab_size=9, source="random")
    write_store(folder, meta, {"train": split, "test": split})


def fuzz_store(source: Path, folder: Path, chance: random.Random) -> None:
    shutil.copytree(source, folder)
    mutate(chance.choice(sorted(folder.iterdir())), chance)
    store = open_store(folder, verify=chance.random() < 0.5)
    config = Stream(cross_documents=chance.random() < 0.5, document_starts=1.0)
    task = StreamTask(store, config, 16, from_nothing=1)
    batch = task.sample(2, torch.Generator().manual_seed(0))
    assert int(batch.inputs.max()) < task.vocab_size, "a token outside the vocabulary came out"
    task.held_out(2, torch.Generator().manual_seed(0))


def make_files(folder: Path) -> None:
    """One raw file of each kind that `memtrain data` takes."""
    from PIL import Image

    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (6, 9, 8), dtype=np.uint8)
    with zipfile.ZipFile(folder / "pictures.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, gray in enumerate(noise):
            stream = io.BytesIO()
            Image.fromarray(gray).save(stream, "PNG" if number % 2 else "JPEG")
            archive.writestr(f"{number}.{'png' if number % 2 else 'jpg'}", stream.getvalue())
    np.save(folder / "tokens.npy", noise.reshape(6, -1).astype(np.int32))
    text = b"It was a dark and stormy night. " * 40
    (folder / "text.txt").write_bytes(text)
    (folder / "text.txt.gz").write_bytes(gzip.compress(text))


def fuzz_file(source: Path, folder: Path, chance: random.Random) -> None:
    folder.mkdir()
    name = chance.choice(sorted(path.name for path in source.iterdir()))
    shutil.copy(source / name, folder / name)
    mutate(folder / name, chance)
    prepare_path(folder / name, folder / "out")


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Path, random.Random], None]]] = {
    "run": (make_run, fuzz_run),
    "writer": (partial(make_run, data=Digits()), fuzz_writer),
    "config": (make_config, fuzz_config),
    "store": (make_store, fuzz_store),
    "file": (make_files, fuzz_file),
}

# --------------------------------------------------------------------------------------- bounds


class Watch:
    """Hears of every import, process and opened file while a case runs."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.fork"):
            self.seen.append(f"{event} {arguments[:2]}")
        elif event == "import" and str(arguments[0]).split(".")[0] in ("evil", "x"):
            self.seen.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[1], str):
            writes = any(letter in arguments[1] for letter in "wax+")
            inside = os.path.abspath(arguments[0]).startswith((self.root, "/dev/null", "/proc/"))
            if writes and not inside:
                self.seen.append(f"writes {arguments[0]}")


def hang(number: int, frame: object) -> None:
    raise Hang


def one_case(act: Callable[[], None], watch: Watch) -> tuple[str, str]:
    """How a case ended: taken, refused or failed, and in which words."""
    watch.seen.clear()
    watch.on = True
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        act()
        ended = "taken", ""
    except MemtrainError as error:
        text = str(error)
        plain = text.strip() and text.count("\n") < LINES and len(text) < LINES * 200
        ended = ("refused", text) if plain else ("failed", f"refused in no few words: {text!r}")
    except Hang:
        ended = "failed", "hangs\n" + traceback.format_exc()
    except BaseException:
        ended = "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.on = False
    return ("failed", "; ".join(watch.seen)) if watch.seen else ended


def bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="how many failures to print")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    counts: Counter[str] = Counter()
    reasons: set[str] = set()
    slowest, failures = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for kind, (make, act) in KINDS.items():
            make(root / kind)
            for seed in range(5):  # what is imported late is imported now
                with contextlib.suppress(MemtrainError):
                    act(root / kind, root / "warm", random.Random(seed))
                shutil.rmtree(root / "warm", ignore_errors=True)
        watch = Watch(root)
        bound_memory()
        case = root / "case"
        for number in range(options.cases):
            chance = random.Random(options.seed * 1_000_003 + number)
            kind = chance.choice(list(KINDS))
            began = time.monotonic()
            act = partial(KINDS[kind][1], root / kind, case, chance)
            ended, words = one_case(act, watch)
            slowest = max(slowest, time.monotonic() - began)
            counts[f"{kind} {ended}"] += 1
            if ended == "refused":
                reasons.add(words.replace(str(root), "")[:60])
            failures += ended == "failed"
            if ended == "failed" and failures <= options.show:
                print(f"case {number} ({kind}) of seed {options.seed} failed:\n{words}", flush=True)
            shutil.rmtree(case, ignore_errors=True)
            if (number + 1) % 1000 == 0:
                print(f"{number + 1} cases, {failures} failed", flush=True)
    print({key: counts[key] for key in sorted(counts)})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.cases} cases, {failures} failed; {len(reasons)} different reasons; "
        f"slowest {slowest:.2f} s, peak {peak:.0f} MB"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
