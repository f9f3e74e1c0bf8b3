"""Where the tokens of a store are during training."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seeded
from memtrain.config import Stream
from memtrain.config.serialize import from_json
from memtrain.data import residence as module
from memtrain.data import window_starts
from memtrain.data.prepare import prepare_text, prepare_tokens
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.residence import auto_limit, gigabytes, stays_on_disk
from memtrain.data.store import Split, StoreMeta
from memtrain.data.stream import StreamTask
from memtrain.data.token_file import TokenFile
from memtrain.errors import MemtrainError
from memtrain.evaluation.ngram import count_baselines

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
GIB = 2**30


@pytest.fixture
def free(monkeypatch) -> dict[str, int]:
    """The free memory of a CPU and of a GPU, which need not exist."""
    sizes = {"cpu": 64 * GIB, "cuda": 80 * GIB}
    monkeypatch.setattr(module, "available_memory", lambda: sizes["cpu"])
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (sizes["cuda"], 2 * sizes["cuda"])
    )
    return sizes


def test_auto_keeps_small_stores_on_the_device(free: dict[str, int]):
    assert auto_limit(CPU) == GIB and auto_limit(GPU) == 20 * GIB
    assert not stays_on_disk(GIB, "auto", CPU) and stays_on_disk(GIB + 1, "auto", CPU)
    assert not stays_on_disk(20 * GIB, "auto", GPU) and stays_on_disk(20 * GIB + 1, "auto", GPU)
    free["cpu"] = 4 * GIB
    assert auto_limit(CPU) == GIB // 4


def test_a_setting_decides_against_the_size(free: dict[str, int]):
    assert stays_on_disk(1, "disk", CPU) and stays_on_disk(1, "disk", GPU)
    assert not stays_on_disk(30 * GIB, "device", CPU)
    assert not stays_on_disk(30 * GIB, "device", GPU)


def test_a_device_without_room_is_refused_with_a_remedy(free: dict[str, int]):
    message = "data.resident=device: the tokens have 81 GiB, cuda:0 has 80 GiB free; leave it at"
    with pytest.raises(MemtrainError, match=message):
        stays_on_disk(81 * GIB, "device", GPU)


def test_an_unknown_place_is_refused():
    with pytest.raises(
        MemtrainError, match=r"data.resident='ram': must be one of 'auto', 'device', 'disk'"
    ):
        from_json('{"data": {"kind": "stream", "resident": "ram"}}')


def test_sizes_have_a_unit():
    assert [gigabytes(n) for n in (12, 3000, 5 * 2**20, 3_000_000_000)] == [
        "12 B",
        "2.93 KiB",
        "5 MiB",
        "2.79 GiB",
    ]


# ------------------------------------------------------------------------------- a stream on disk


def stories(folder: Path) -> Path:
    text = "".join(f"story {n} {n * n}\n" * (3 + n % 5) + "<|endoftext|>\n" for n in range(90))
    (folder / "stories.txt").write_text(text)
    return prepare_text(folder / "stories.txt", folder / "store").folder


def book(folder: Path) -> Path:
    (folder / "book.txt").write_text("".join(f"line {n} of it\n" for n in range(400)))
    return prepare_text(folder / "book.txt", folder / "store").folder


def rows(folder: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, 300, (60, 25))
    np.save(folder / "rows.npy", tokens)
    return prepare_tokens(folder / "rows.npy", folder / "store").folder


def large_vocabulary(folder: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, 2**24, 3000)
    np.save(folder / "wide.npy", tokens)
    return prepare_tokens(folder / "wide.npy", folder / "store").folder


def numbers(task: StreamTask) -> list[torch.Tensor]:
    """All that training and evaluation take from the data."""
    corpus = task.corpus()
    assert corpus is not None
    batch = task.held_out(9, seeded())
    counts = count_baselines(corpus, batch.inputs, batch.inputs, limit=2**18)
    return [
        *(task.windows(12, rows).sample(16, seeded(rows)).inputs for rows in (0, 4, 16)),
        batch.inputs,
        task.windows(20).held_out(30, seeded()).targets,
        torch.tensor([task.held_out_sequences, task.windows(15).held_out_sequences]),
        torch.tensor([one.nats for one in counts]),
        corpus.block(3, 40),
        *(task.tokens(split).long() for split in ("train", "test")),
    ]


@pytest.mark.parametrize("made", [stories, book, rows, large_vocabulary])
def test_tokens_on_disk_and_in_memory_give_the_same_numbers(tmp_path: Path, made):
    folder = made(tmp_path)
    tasks = [
        StreamTask.from_config(Stream(path=str(folder), evaluate_length=16, resident=place))
        for place in ("device", "disk")
    ]
    one, other = map(numbers, tasks)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert tasks[0].spelling == tasks[1].spelling and tasks[0].identity == tasks[1].identity
    assert tasks[1].in_background and not tasks[0].in_background


@pytest.mark.parametrize("resident", ["device", "disk"])
def test_a_store_of_an_earlier_version_has_the_same_codec(tmp_path: Path, resident):
    """It does not record which bytes occur: they are found in its tokens."""
    folder = book(tmp_path)
    config = Stream(path=str(folder), evaluate_length=16, resident=resident)
    now = StreamTask.from_config(config)
    plain = json.loads((folder / "meta.json").read_text())
    for split in plain["splits"].values():
        assert split.pop("alphabet")
    (folder / "meta.json").write_text(json.dumps(plain))
    earlier = StreamTask.from_config(config)
    assert earlier.spelling == now.spelling and earlier.identity == now.identity


@pytest.mark.parametrize("cross", [True, False])
def test_windows_on_disk_may_stay_within_documents(tmp_path: Path, cross: bool):
    folder = rows(tmp_path)
    config = Stream(path=str(folder), evaluate_length=16, cross_documents=cross, resident="disk")
    memory = Stream(path=str(folder), evaluate_length=16, cross_documents=cross)
    one, other = (
        StreamTask.from_config(each).windows(7, 8).sample(20, seeded(2))
        for each in (config, memory)
    )
    assert torch.equal(one.inputs, other.inputs)


def test_images_on_disk_are_those_in_memory(tmp_path: Path):
    from PIL import Image

    (tmp_path / "images").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (30, 6, 6), np.uint8)
    for index, image in enumerate(noise):
        Image.fromarray(image).save(tmp_path / "images" / f"{index}.png")
    from memtrain.data.prepare import prepare_images

    folder = prepare_images(tmp_path / "images", tmp_path / "store", levels=4).folder
    found = [
        StreamTask.from_config(
            Stream(path=str(folder), evaluate_length=20, resident=place)
        ).held_out_images(2, seeded())
        for place in ("device", "disk")
    ]
    one, other = found
    assert one is not None and other is not None and torch.equal(one, other)


def test_a_store_beyond_the_limit_stays_on_disk_until_a_device_has_room(
    tmp_path: Path, monkeypatch
):
    folder = rows(tmp_path)
    monkeypatch.setattr(module, "CPU_BYTES", 100)
    task = StreamTask.from_config(Stream(path=str(folder), evaluate_length=16))
    assert task.in_background and isinstance(task._tokens["train"], TokenFile)
    assert "read from disk in the background (data.resident=auto: more than 100 B" in task.placement
    before = numbers(task)
    monkeypatch.setattr(module, "CPU_BYTES", GIB)
    task.to(CPU)  # as a GPU with more room
    assert not task.in_background
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(task), strict=True))


def test_a_store_for_the_device_is_loaded_when_the_device_is_known(tmp_path: Path, monkeypatch):
    folder = rows(tmp_path)
    monkeypatch.setattr(module, "CPU_BYTES", 100)
    task = StreamTask.from_config(Stream(path=str(folder), evaluate_length=16, resident="device"))
    assert task.in_background
    assert not task.to(CPU).in_background


def test_a_gpu_without_room_gets_batches_from_memory(tmp_path: Path, free: dict[str, int]):
    task = StreamTask.from_config(Stream(path=str(rows(tmp_path)), evaluate_length=16))
    assert not task.in_background
    free["cuda"] = 100
    task.to(GPU)
    assert task.in_background and task.device == GPU
    where = "read from memory in the background (data.resident=auto: more than 25 B"
    assert where in task.placement


@pytest.mark.parametrize("happens", ["removed", "replaced"])
def test_a_task_on_disk_does_not_see_later_changes_of_the_folder(tmp_path: Path, happens: str):
    folder = stories(tmp_path)
    task = StreamTask.from_config(Stream(path=str(folder), evaluate_length=16, resident="disk"))
    before = numbers(task)
    if happens == "removed":
        shutil.rmtree(folder)
    else:
        (tmp_path / "other.txt").write_text("something else\n" * 900)
        prepare_text(tmp_path / "other.txt", folder, overwrite=True)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(task), strict=True))


def test_a_changed_store_on_disk_is_found_when_it_is_loaded(tmp_path: Path):
    folder = rows(tmp_path)
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    task = StreamTask.from_config(Stream(path=str(folder), evaluate_length=16, resident="disk"))
    with pytest.raises(MemtrainError, match=r"train.bin: is not what was written \(checksum\)"):
        task.tokens("train")


def test_lines_of_a_long_text_are_found_in_evenly_spread_stretches(monkeypatch):
    monkeypatch.setattr(window_starts, "SEARCHED", 40)
    monkeypatch.setattr(window_starts, "STRETCH", 10)
    tokens = torch.frombuffer(bytearray(b"abcd\n" * 40), dtype=torch.uint8)
    found = window_starts.document_begins(
        np.array([0]), tokens, 2, newline=10, images=False
    ).tolist()
    assert found == [0, 4, 9, 64, 69, 129, 134, 194, 199]


def test_overlapping_held_out_windows_of_a_long_stream_stay_inside(tmp_path: Path):
    """A float of 32 bits cannot count beyond 2^24: the last window would reach over the end."""
    length = 8000
    last = 2**24 + 3  # rounds to 2**24 + 4
    tokens = np.resize(np.arange(250, dtype=np.uint8), last + length + 1)
    start = np.zeros(1, np.int64)
    splits = {"train": Split(tokens[: length + 1], start), "test": Split(tokens, start)}
    meta = StoreMeta(name="long", vocab_size=250, source="long")
    write_store(tmp_path / "store", meta, splits)
    config = Stream(path=str(tmp_path / "store"), evaluate_length=length, resident="disk")
    task = StreamTask.from_config(config)
    wanted = task.held_out_sequences + 3
    rows = task.held_out(wanted, seeded())
    assert len(rows.inputs) == wanted
    ending = torch.from_numpy(tokens[-length:].astype(np.int64))
    assert (rows.targets == ending).all(dim=1).any()
