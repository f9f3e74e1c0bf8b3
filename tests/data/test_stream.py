"""Windows of prepared data."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY, seeded
from memtrain.config import Stream
from memtrain.data import store_reader
from memtrain.data import window_starts as module
from memtrain.data.prepare import prepare_path, prepare_text, prepare_tokens
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, StoreMeta
from memtrain.data.store_reader import open_store
from memtrain.data.stream import StreamTask
from memtrain.data.task import build_task, check_task
from memtrain.data.window_starts import (
    LONG_DOCUMENT,
    WindowSampler,
    document_begins,
    has_few_long_documents,
    make_distinct,
    make_distinct_from,
)
from memtrain.errors import MemtrainError
from memtrain.shapes import IGNORE_INDEX
from memtrain.training.run import Run
from memtrain.training.step import Trainer

STORY = "".join(f"the {n}th line says {n * n}\n" for n in range(400))


@pytest.fixture
def text(tmp_path: Path) -> StreamTask:
    (tmp_path / "book.txt").write_text(STORY)
    prepare_text(tmp_path / "book.txt", tmp_path / "book")
    return StreamTask.from_config(Stream(path=str(tmp_path / "book"), evaluate_length=32))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (30, 6, 6), np.uint8)
    for index, image in enumerate(noise):
        Image.fromarray(image).save(folder / f"{index}.png")
    prepare_path(folder, tmp_path / "prepared", levels=4)
    return tmp_path / "prepared"


@pytest.fixture
def classes(tmp_path: Path) -> StreamTask:
    """Images of 6x6 pixels of 4 levels; the first pixel of each is its class."""
    images = np.random.default_rng(0).integers(0, 256, (60, 6, 6), np.uint8)
    labels = np.arange(60) % 3
    images[:, 0, 0] = 85 * labels
    np.save(tmp_path / "a.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    prepare_path(tmp_path / "a.npy", tmp_path / "labelled", levels=4, labels=True)
    return StreamTask.from_config(Stream(path=str(tmp_path / "labelled"), evaluate_length=36))


def test_classes_are_read_and_are_no_targets(classes: StreamTask):
    check_task(classes)
    assert classes.vocab_size == 7 and classes.unit == "pixel"
    held = classes.held_out(99, seeded())
    assert bool((held.inputs[:, 0] >= 4).all()) and bool((held.inputs[:, 1:] < 4).all())
    assert bool((held.targets < 4).all()) and bool((held.targets >= 0).all())  # every pixel
    assert torch.equal(held.inputs[:, 0] - 4, held.targets[:, 0])  # of the class of its image
    batch = classes.windows(80).sample(50, seeded())
    after = batch.inputs[:, 1:]
    assert torch.equal(batch.targets[:, :-1], after.where(after < 4, IGNORE_INDEX))
    assert int((batch.targets == IGNORE_INDEX).sum()) > 50


def test_a_codec_with_classes_counts_the_training_images(classes: StreamTask):
    codec = classes.spelling
    assert codec.classes == ("0", "1", "2") and codec.writable == 4 and not codec.start_written
    counted = classes.store.splits["train"].documents
    assert sum(codec.class_counts) == counted and max(codec.class_counts) <= 20
    assert codec.start_token == 4 + int(np.argmax(codec.class_counts))


def test_classes_are_not_in_the_corpus_but_with_held_out_images(classes: StreamTask):
    corpus = classes.corpus()
    assert (corpus.vocab_size, corpus.width, corpus.document_length) == (4, 6, 36)
    assert len(corpus.tokens) == 36 * classes.store.splits["train"].documents
    assert int(corpus.block(0, len(corpus.tokens)).max()) == 3
    images = classes.held_out_images(4, seeded())
    assert images is not None and images.shape[1] == 37
    assert torch.equal(images[:, 0] - 4, images[:, 1])


def test_a_stream_keeps_the_task_contract(text: StreamTask):
    check_task(text)


def test_windows_are_slices_of_the_text_and_targets_are_shifted_by_one(text: StreamTask):
    batch = text.windows(20).sample(50, seeded())
    assert batch.inputs.shape == (50, 20)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    for row in batch.inputs.tolist():
        assert bytes(row).decode() in STORY


def test_every_position_of_the_stream_can_be_sampled(tmp_path: Path):
    np.save(tmp_path / "tokens.npy", np.arange(40, dtype=np.uint8))
    prepare_tokens(tmp_path / "tokens.npy", tmp_path / "store", held_out=0.25)
    task = StreamTask.from_config(Stream(path=str(tmp_path / "store"), evaluate_length=4))
    batch = task.sample(2000, seeded())
    assert set(batch.inputs[:, 0].tolist()) == set(range(26))  # 30 tokens, windows of 5
    assert int(batch.targets.max()) == 29


@pytest.mark.parametrize("vocab_size", [256, 300, 2**15, 2**16, 70_000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("resident", ["device", "disk"])
def test_tokens_of_every_size_are_sampled_as_they_were_written(
    tmp_path: Path, vocab_size: int, device: str, resident: str
):
    """A GPU cannot index unsigned numbers of 16 bits."""
    written = np.random.default_rng(0).integers(0, vocab_size, 2000)
    written[-2:] = vocab_size - 1  # the largest, in the held-out part
    written[:2] = vocab_size - 1
    np.save(tmp_path / "tokens.npy", written)
    prepare_tokens(tmp_path / "tokens.npy", tmp_path / "store", vocab_size=vocab_size)
    config = Stream(path=str(tmp_path / "store"), evaluate_length=4, resident=resident)  # pyright: ignore[reportArgumentType]
    task = StreamTask.from_config(config).to(torch.device(device))
    known = {tuple(row) for row in np.lib.stride_tricks.sliding_window_view(written, 5)}
    for batch in (
        task.sample(500, torch.Generator(device).manual_seed(0)),
        task.held_out(20, seeded()),
    ):
        rows = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
        assert rows.dtype == torch.long
        assert {tuple(row) for row in rows.tolist()} <= known
    kept = torch.cat([task.tokens("train"), task.tokens("test")])
    assert kept.tolist() == written.tolist()


def test_held_out_sequences_are_not_trained_on_and_start_documents(pictures: Path):
    task = StreamTask.from_config(Stream(path=str(pictures), evaluate_length=20))
    batch = task.held_out(100, seeded())
    starts = task.store.starts("test")
    tokens = task.store.tokens("test")
    firsts = {tuple(tokens[s : s + 20].tolist()) for s in starts}
    assert len(batch.inputs) >= 1
    assert {tuple(row) for row in batch.inputs.tolist()} <= firsts


def test_held_out_sequences_of_one_text_are_disjoint_and_larger_counts_extend_smaller_ones(
    text: StreamTask,
):
    task = text.windows(20)
    there = task.held_out_sequences
    assert there == len(task.store.tokens("test")) // 21
    all_of_them = task.held_out(there, seeded()).inputs
    assert len(all_of_them) == there > 3
    assert torch.equal(task.held_out(3, seeded()).inputs, all_of_them[:3])
    held_out = bytes(task.store.tokens("test")).decode()
    pieces = [held_out[start : start + 20] for start in range(0, len(held_out) - 20, 21)]
    assert sorted(bytes(row).decode() for row in all_of_them.tolist()) == sorted(pieces)


def test_windows_of_a_short_text_overlap(text: StreamTask):
    task = text.windows(20)
    wanted = task.held_out_sequences + 5
    assert len(task.held_out(wanted, seeded()).inputs) == wanted


def test_more_windows_than_a_text_has_are_all_of_them_and_take_no_memory(text: StreamTask):
    task = text.windows(20)
    windows = len(task.store.tokens("test")) - 20
    assert len(task.held_out(10**13, seeded()).inputs) == windows


@pytest.mark.parametrize(
    ("share", "empty_start_rows", "at_least"), [(1.0, 6, 6), (0.5, 6, 3), (0.0, 6, 0), (1.0, 0, 0)]
)
def test_windows_from_the_empty_memory_may_start_at_documents(
    pictures: Path, share: float, empty_start_rows: int, at_least: int
):
    config = Stream(path=str(pictures), evaluate_length=20, document_starts=share)
    task = StreamTask.from_config(config).windows(9, empty_start_rows)
    tokens, starts = task.store.tokens("train"), task.store.starts("train")
    firsts = {tuple(tokens[s : s + 9].tolist()) for s in starts if s + 10 <= len(tokens)}
    for seed in range(20):
        rows = [tuple(row) for row in task.sample(8, seeded(seed)).inputs.tolist()]
        assert all(row in firsts for row in rows[:at_least])
    others = [
        tuple(row)
        for seed in range(20)
        for row in task.sample(8, seeded(seed)).inputs.tolist()[at_least:]
    ]
    assert not all(row in firsts for row in others)


def test_windows_that_may_not_cross_stay_within_one_document(pictures: Path):
    config = Stream(path=str(pictures), evaluate_length=20, cross_documents=False)
    task = StreamTask.from_config(config).windows(20)
    tokens, starts = task.store.tokens("train"), task.store.starts("train")
    inside = {
        tuple(tokens[offset : offset + 21].tolist())
        for start in starts
        for offset in range(start, start + 36 - 20)
    }
    batch = task.sample(300, seeded())
    whole = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
    assert {tuple(row) for row in whole.tolist()} <= inside


def test_too_short_data_error_names_the_tokens_needed(text: StreamTask):
    with pytest.raises(MemtrainError, match="at least 100,001 are needed"):
        text.windows(100_000)


def test_an_empty_path_is_named(tmp_path: Path):
    with pytest.raises(MemtrainError, match="nothing-here"):
        build_task(Stream(path=str(tmp_path / "nothing-here")))
    with pytest.raises(MemtrainError, match="memtrain data"):
        build_task(Stream())


def test_held_out_images_are_whole_and_not_trained_on(pictures: Path):
    task = StreamTask.from_config(Stream(path=str(pictures), evaluate_length=20))
    found = task.held_out_images(100, seeded())
    assert found is not None
    test = np.array(task.store.tokens("test")).reshape(-1, 36)
    assert sorted(found.tolist()) == sorted(test.tolist())
    one = task.held_out_images(1, seeded())
    assert one is not None and len(one) == 1


def test_generation_starts_like_a_document(tmp_path: Path, text: StreamTask):
    assert text.spelling is not None and text.spelling.start_token == ord("\n")  # one document
    assert bytes(text.spelling.alphabet).decode() == "".join(sorted(set(STORY)))
    (tmp_path / "many.txt").write_text("".join(f"Once {n}\n<|endoftext|>\n" for n in range(40)))
    prepare_text(tmp_path / "many.txt", tmp_path / "many")
    many = StreamTask.from_config(Stream(path=str(tmp_path / "many"), evaluate_length=8))
    assert many.spelling is not None and many.spelling.start_token == ord("O")
    assert many.windows(4).spelling is many.spelling
    assert text.held_out_images(1, seeded()) is None


@pytest.mark.parametrize("encoder", ["bidirectional", "causal"])
@pytest.mark.parametrize("timesteps", [1, 4])
def test_a_stream_trains_through_every_stage(text: StreamTask, tmp_path: Path, encoder, timesteps):
    config = replace(
        TINY,
        data=Stream(path=str(tmp_path / "book"), evaluate_length=24),
        teacher=replace(
            TINY.teacher,
            encoder=encoder,
            padding="void" if encoder == "bidirectional" else "mask",
            context_length=8,
        ),
        smt=replace(TINY.smt, steps=3, timesteps=timesteps, future_length=5),
        dmt=replace(TINY.dmt, steps=2, rollout_length=7, empty_start=0.5, label_stride=2),
        bptt=replace(TINY.bptt, steps=2, sequence_length=9),
    )
    run = Run.create(config, tmp_path / "run").train()
    tokens = [stage.tokens for stage in run.progress.stages]
    assert tokens == [3 * 4 * 13, 2 * 4 * 15, 2 * 4 * 9]
    assert run.evaluate(4).drift is not None


# ------------------------------------------------------------------------------ distinct windows


def one_text(folder: Path) -> Path:
    (folder / "one.txt").write_text(STORY)
    return folder / "one.txt"


def two_texts(folder: Path) -> Path:
    """Of which one is held out, so that one document is left."""
    (folder / "two").mkdir()
    for name in ("a", "b"):
        (folder / "two" / f"{name}.txt").write_text(STORY)
    return folder / "two"


def few_texts(folder: Path) -> Path:
    (folder / "few").mkdir()
    for number in range(5):
        (folder / "few" / f"{number}.txt").write_text(STORY[number * 900 : (number + 1) * 900])
    return folder / "few"


def one_line(folder: Path) -> Path:
    (folder / "line.txt").write_text(STORY.replace("\n", " "))
    return folder / "line.txt"


def tokens_in_a_row(folder: Path) -> Path:
    np.save(folder / "row.npy", np.arange(3000) % 250)
    return folder / "row.npy"


def few_documents(folder: Path) -> Path:
    np.save(folder / "documents.npy", np.arange(6 * 80).reshape(6, 80))
    return folder / "documents.npy"


SOURCES = [one_text, two_texts, few_texts, one_line, tokens_in_a_row, few_documents]


def offsets_of_a_batch(run: Run, stage: str, monkeypatch) -> list[list[int]]:
    """Where the windows of batches begin that a stage of a run trains on."""
    seen: list[list[int]] = []
    gather = StreamTask._gather

    def noted(task: StreamTask, tokens: torch.Tensor, offsets: torch.Tensor):
        seen.append(offsets.tolist())
        return gather(task, tokens, offsets)

    config = run.config.stages()[stage]
    trainer = Trainer(run.objective(stage), config, run.task, run.engine, 0)
    monkeypatch.setattr(StreamTask, "_gather", noted)
    for _ in range(20):
        trainer.task.sample(config.batch_size, trainer.generator)
    monkeypatch.setattr(StreamTask, "_gather", gather)
    return seen


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cross", [True, False])
def test_no_batch_of_any_stage_holds_a_window_twice(
    tmp_path: Path, monkeypatch, source: Callable[[Path], Path], cross: bool
):
    prepare_path(source(tmp_path), tmp_path / "store")
    config = replace(
        TINY,
        data=Stream(path=str(tmp_path / "store"), evaluate_length=24, cross_documents=cross),
        teacher=replace(TINY.teacher, context_length=8),
        smt=replace(TINY.smt, batch_size=32, timesteps=1, future_length=5, short_contexts=0.5),
        dmt=replace(TINY.dmt, batch_size=32, rollout_length=7),
        bptt=replace(TINY.bptt, batch_size=32, sequence_length=9),
    )
    run = Run(config, tmp_path / "run")
    starts = set(open_store(tmp_path / "store").starts("train").tolist())
    documents = len(starts) if source is few_documents else 0
    for stage in ("smt", "dmt", "bptt"):
        batches = offsets_of_a_batch(run, stage, monkeypatch)
        assert all(len(set(batch)) == 32 for batch in batches)
        # No window is in every batch but those that begin the documents of a few.
        always = set.intersection(*map(set, batches))
        assert always == (starts if documents else set())


def test_windows_of_one_text_read_from_the_empty_memory_begin_at_a_line_end(text: StreamTask):
    """As generation does."""
    task = text.windows(9, empty_start_rows=16)
    batch = task.sample(16, seeded())
    assert task.spelling.start_token == ord("\n")
    firsts = batch.inputs[:8]
    assert (firsts[:, 0] == ord("\n")).sum() >= 7  # or the text's own beginning
    assert len(firsts.unique(dim=0)) == 8
    assert (batch.inputs[8:, 0] != ord("\n")).any()


def test_generation_for_a_few_long_texts_starts_after_a_line_end(tmp_path: Path):
    (tmp_path / "books").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "books" / f"{name}.txt").write_text(STORY * 3)
    prepare_text(tmp_path / "books", tmp_path / "store")
    task = StreamTask.from_config(Stream(path=str(tmp_path / "store"), evaluate_length=8))
    assert len(task.store.starts("train")) == 2
    assert task.spelling.start_token == ord("\n")


def test_stories_begin_at_their_starts(tmp_path: Path):
    """Many documents: half of the rows begin one of them, drawn uniformly."""
    starts = np.arange(0, 6000, 30)
    tokens = np.arange(6000) % 251
    split = Split(tokens, starts)
    write_store(
        tmp_path / "stories",
        StoreMeta(name="s", vocab_size=256, source="s", text=True),
        {"train": split, "test": split},
    )
    task = StreamTask.from_config(Stream(path=str(tmp_path / "stories"), evaluate_length=8))
    windows = task.windows(5, empty_start_rows=64)
    generator, again = seeded(1), seeded(1)
    same = 0
    for _ in range(40):
        places = torch.randint(6000 - 5, (128,), generator=generator)
        places[:32] = torch.from_numpy(starts)[torch.randint(200, (32,), generator=generator)]
        found = windows.sample(128, again).inputs[:, 0]
        same += int((found == places % 251).sum())
    assert same > 0.85 * 40 * 128  # all but what was drawn before, and what that pushes


def test_images_of_other_tokens_are_refused_with_the_difference(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 3), np.uint8)
    labels = {"a": np.arange(16) % 2, "b": 3 + np.arange(16) % 2}

    def prepared(name: str, images: np.ndarray, **options) -> StreamTask:
        np.save(tmp_path / f"{name}.npy", images)
        prepare_path(tmp_path / f"{name}.npy", tmp_path / name, held_out=0.4, **options)
        return StreamTask.from_config(Stream(path=str(tmp_path / name), evaluate_length=16))

    for name, classes in labels.items():
        np.save(tmp_path / f"{name}-classes.npy", classes)
    colour = prepared("colour", noise, colour=True, levels=8)
    grey = prepared("grey", noise, levels=16)
    few = {"levels": 2, "patch": 2}
    mine = prepared("a", noise, labels=str(tmp_path / "a-classes.npy"))
    for run, other, message in (
        (colour, prepared("inverse", 255 - noise, colour=True, levels=8), "has other colours than"),
        (grey, prepared("wide", noise[:, :, :2], levels=16), "images of 4x2 pixels, the run learn"),
        (grey, colour, "has 8 tokens, the run learned 16; prepare it with the same --option"),
        (grey, prepared("ink", noise, **few), "has tokens of another kind than the run learned"),
        (mine, prepared("b", noise, labels=str(tmp_path / "b-classes.npy")), "has other classes"),
    ):
        with pytest.raises(MemtrainError, match=f"data=other: .*{message}"):
            run.on(other.store, "other")
        assert run.on(run.store, "own").store is run.store


# ----------------------------------------------------------------------- the folder afterwards


def numbers(task: StreamTask) -> list[torch.Tensor]:
    """All that a training draws from its data."""
    windows = task.windows(12, empty_start_rows=8)
    corpus = task.corpus()
    assert corpus is not None
    return [
        windows.sample(16, seeded()).inputs,
        task.held_out(9, seeded()).inputs,
        task.windows(40).held_out(9, seeded()).targets,
        torch.tensor([task.held_out_sequences, task.windows(50).held_out_sequences]),
        corpus.block(0, len(corpus.tokens)),
        *(task.tokens(split) for split in ("train", "test")),
    ]


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def truncated(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:3])


def swapped(folder: Path) -> None:
    source = folder.with_name("other.txt")
    source.write_text("something else\n<|endoftext|>\nand more of it\n" * 500)
    prepare_text(source, folder, held_out=0.5, overwrite=True)


@pytest.mark.parametrize("happens", [removed, truncated, swapped])
def test_a_task_does_not_see_later_changes_of_the_folder(tmp_path: Path, happens):
    stories = "".join(f"story {n} {n * n}\n" * (3 + n % 5) + "<|endoftext|>\n" for n in range(90))
    (tmp_path / "stories.txt").write_text(stories)
    folder = prepare_text(tmp_path / "stories.txt", tmp_path / "stories").folder
    task = StreamTask.from_config(Stream(path=str(folder), evaluate_length=32))
    before = [number.clone() for number in numbers(task)]
    happens(folder)
    after = numbers(task)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_training_and_evaluation_keep_the_store_they_opened(text: StreamTask, tmp_path: Path):
    config = replace(
        TINY,
        data=Stream(path=str(tmp_path / "book"), evaluate_length=24),
        teacher=replace(TINY.teacher, context_length=8),
        smt=replace(TINY.smt, timesteps=1, future_length=5, steps=6),
        dmt=replace(TINY.dmt, steps=0),
        bptt=replace(TINY.bptt, steps=6, sequence_length=9),
    )
    whole = Run.create(config, tmp_path / "whole").train()
    run = Run.create(config, tmp_path / "run").train(until="smt")
    swapped(tmp_path / "book")
    run.train()
    assert run.evaluate(8).rnn == whole.evaluate(8).rnn
    losses, others = (
        re.findall(
            r'"(?:loss|\w*nats\w*)": [\d.e-]+', (tmp_path / name / "metrics.jsonl").read_text()
        )
        for name in ("whole", "run")
    )
    assert losses == others and len(losses) > 6


def test_a_store_that_is_replaced_while_it_is_read_is_read_again(
    text: StreamTask, tmp_path: Path, monkeypatch
):
    """Its tokens are never mixed with the starts of another."""
    load = store_reader._load_starts
    times = []

    def late(store, name):
        if len(times) < limit:
            times.append(name)
            swapped(store.folder) if len(times) % 2 else again(store.folder)
        return load(store, name)

    def again(folder: Path) -> None:
        prepare_text(tmp_path / "book.txt", folder, overwrite=True)

    monkeypatch.setattr(store_reader, "_load_starts", late)
    limit = 1
    config = Stream(path=str(tmp_path / "book"), evaluate_length=32)
    task = StreamTask.from_config(config)
    assert bytes(task.tokens("train").tolist()).startswith(b"something else\n")
    assert task.identity == StreamTask.from_config(config).identity != text.identity
    limit, times = 99, []
    with pytest.raises(MemtrainError, match=r"was replaced while|not what was written|not hold"):
        StreamTask.from_config(config)


def test_a_store_with_changed_tokens_is_refused_before_training(text: StreamTask, tmp_path: Path):
    path = tmp_path / "book/train.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(MemtrainError, match=r"train.bin is not what was written .*prepare it"):
        StreamTask.from_config(text.config)


def test_the_fraction_of_document_starts_is_rounded_to_rows(pictures: Path):
    config = Stream(path=str(pictures), evaluate_length=20, document_starts=0.6)
    task = StreamTask.from_config(config).windows(9, empty_start_rows=3)  # 1.8 rows
    length = task.store.meta.document_length
    assert length is not None
    train = bytes(task.store.tokens("train").tolist())
    starts = {train[first : first + 9] for first in range(0, len(train), length)}
    batches = [task.sample(8, seeded(seed)).inputs.tolist() for seed in range(20)]
    assert all(bytes(row) in starts for rows in batches for row in rows[:2])
    assert not all(bytes(rows[2]) in starts for rows in batches)


def test_overlapping_windows_of_one_text_reach_from_its_first_to_its_last_token(text: StreamTask):
    task = text.windows(20)
    rows = task.held_out(task.held_out_sequences + 5, seeded())
    held_out = STORY.encode()[-len(task.store.tokens("test")) :]
    assert list(held_out[:20]) in rows.inputs.tolist()
    assert list(held_out[-20:]) in rows.targets.tolist()


STARTS = np.array([0, 5, 7, 17])  # documents of 5, 2, 10 and 3 tokens
TOKENS = 20
CPU = torch.device("cpu")


def make(size: int, cross: bool, begins: list[int] | None = None) -> WindowSampler:
    given_begins = None if begins is None else np.array(begins, np.int64)
    return WindowSampler(STARTS, TOKENS, size, cross, CPU, given_begins)


PLACES = [
    (4, True, list(range(17))),
    (20, True, [0]),
    (4, False, [0, 1, 7, 8, 9, 10, 11, 12, 13]),
    (3, False, [0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 17]),
    (10, False, [7]),
]


@pytest.mark.parametrize(("size", "cross", "expected"), PLACES)
@pytest.mark.parametrize("count", [5, 6000])
def test_windows_start_uniformly_at_every_valid_position(size, cross, expected, count):
    offsets, generator = make(size, cross), seeded()
    drawn = torch.cat([offsets.draw(count, generator) for _ in range(6000 // count)])
    begins, counts = drawn.unique(return_counts=True)
    assert begins.tolist() == expected and offsets.places == len(expected)
    share = 6000 / len(begins)
    assert all(abs(count - share) < 6 * share**0.5 for count in counts.tolist())


@pytest.mark.parametrize(
    ("size", "cross", "expected"),
    [(3, True, [0, 5, 7, 17]), (4, True, [0, 5, 7]), (4, False, [0, 7]), (20, True, [0])],
)
def test_windows_at_starts_begin_documents_that_are_long_enough(size, cross, expected):
    offsets, generator = make(size, cross), seeded()
    batches = [offsets.draw(offsets.places, generator, 4).tolist() for _ in range(50)]
    assert all(sorted(batch[: len(expected)]) == expected for batch in batches)
    assert all(len(set(batch)) == offsets.places for batch in batches)


@pytest.mark.parametrize("cross", [True, False])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    size=st.integers(1, 12),
    count=st.integers(1, 80),
    starting=st.integers(0, 80),
    seed=st.integers(0, 2**32),
)
def test_windows_repeat_only_when_all_are_used(cross, lengths, size, count, starting, seed):
    tokens = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    if size > (tokens if cross else max(lengths)):
        return
    offsets = WindowSampler(starts, tokens, size, cross, CPU)
    starting = min(starting, count)
    drawn = offsets.draw(count, seeded(seed), starting).tolist()
    ends = [*starts[1:], tokens]
    room = [
        place
        for start, end in zip(starts, ends, strict=True)
        for place in range(start, min(end, tokens - size + 1) if cross else end - size + 1)
    ]
    times = [drawn.count(place) for place in room]
    assert sum(times) == count == len(drawn)
    assert max(times) - min(times) <= 1  # distinct, and round by round where there are too few
    at_starts = sorted(set(starts.tolist()) & set(room))
    documents = drawn[: min(starting, len(at_starts))]
    assert set(documents) <= set(at_starts) and len(set(documents)) == len(documents)


def test_distinct_draws_are_unchanged():
    """So batches of a corpus that is not tiny are what uniform draws give, nearly always."""
    offsets = WindowSampler(np.arange(0, 10**6, 100), 10**6, 50, True, CPU)
    places = torch.randint(10**6 - 49, (64,), generator=(generator := seeded(3)))
    starts = torch.randint(10**4, (16,), generator=generator) * 100
    expected = torch.cat([starts, places[16:]])
    assert len(expected.unique()) == 64
    assert torch.equal(offsets.draw(64, seeded(3), 16), expected)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 3), (3, 4), (2, 5), (4, 4)])
def test_numbers_are_uniform_in_every_row(count, size):
    """Over all draws there are, each equally likely."""
    drawn = torch.tensor(list(product(range(size), repeat=count)))
    spread = torch.stack([make_distinct(row, size) for row in drawn])
    assert all(len(set(row)) == count for row in spread.tolist())
    for column in spread.T:
        assert torch.bincount(column, minlength=size).tolist() == [len(drawn) // size] * size


@given(st.data())
def test_make_distinct_from_avoids_taken_numbers(data):
    size = data.draw(st.integers(1, 30))
    taken = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1))
    below = st.integers(0, size - 1)
    drawn = data.draw(st.lists(below, min_size=1, max_size=size - len(taken)))
    rows = torch.tensor(drawn), torch.tensor(taken, dtype=torch.long)
    found = make_distinct_from(*rows, size).tolist()
    assert len({*found, *taken}) == len(found) + len(taken) and max(found) < size
    if len({*drawn, *taken}) == len(drawn) + len(taken):
        assert found == drawn


# ------------------------------------------------------------------------------- beginnings


def begins(
    content: bytes, starts: list[int], rows: int, *, text: bool = True, images: bool = False
) -> list[int]:
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    newline = ord("\n") if text else None
    found = document_begins(np.array(starts), tokens, rows, newline=newline, images=images)
    return found.tolist()


def test_many_documents_begin_at_their_starts():
    assert begins(b"a\nb\nc\nd\n", [0, 2, 4, 6], 4) == [0, 2, 4, 6]
    assert begins(b"abcdefgh", [0, 4], 2, text=False) == [0, 4]


def test_one_text_begins_at_every_line_with_the_line_end_before_it():
    assert begins(b"ab\ncd\nef\n", [0], 3) == [0, 2, 5, 8]


def test_with_fewer_documents_than_rows_lines_are_used_or_rows_are_dropped():
    assert begins(b"ab\ncd\nef\ngh", [0, 6], 4) == [0, 2, 5, 6, 8]
    assert begins(b"abcdefghijk", [0, 6], 4) == [0, 6]
    assert begins(b"abcdefghijk", [0, 6], 4, text=False, images=True) == [0, 6]


def test_a_stream_without_lines_begins_anywhere():
    assert begins(b"abcdefgh", [0], 3) == begins(b"a\ncdefgh", [0], 3) == []
    assert begins(b"ab\ncd\nef\n", [0], 3, text=False) == []


def test_starts_of_few_long_documents_are_not_oversampled(monkeypatch):
    monkeypatch.setattr(module, "LONG_DOCUMENT", 6)
    books = b"title\n" + b"x" * 9 + b"\nmore\n" + b"y" * 9 + b"\n"
    assert begins(books, [0, 16], 2) == [0, 5, 15, 16, 20, 30]
    assert begins(books.replace(b"\n", b" "), [0, 16], 2) == []
    assert begins(books, [0, 16], 2, text=False) == []
    assert begins(books, [0, 16], 2, text=False, images=True) == [0, 16]
    assert begins(b"title\n" + b"x" * 80, [0], 2) == []  # one line of two is not worth it either
    monkeypatch.setattr(module, "FEW_DOCUMENTS", 2)
    assert begins(books, [0, 16], 2) == [0, 16]


def test_stories_and_images_are_not_long_documents():
    assert not has_few_long_documents(np.arange(0, 900 * 500, 900), 900 * 500)
    assert not has_few_long_documents(np.arange(0, 784 * 60, 784), 784 * 60)
    assert has_few_long_documents(np.array([0, 10]), 3 * LONG_DOCUMENT)


# -------------------------------------------------------------------------------------- rest


def test_windows_longer_than_every_document_are_refused_with_a_reason():
    with pytest.raises(MemtrainError, match="window of 11 tokens, the longest has 10"):
        make(11, False)


def test_the_generator_may_be_on_another_device():
    """ "meta" replaces a GPU."""
    offsets = WindowSampler(np.array([0, 10]), 30, 5, True, torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    assert offsets.draw(3, generator, 1).device.type == "meta"


def test_sampling_does_not_synchronise_with_the_host():
    """Which a CUDA graph could not replay: on "meta", a tensor has no values to decide by."""
    offsets = WindowSampler(np.arange(0, 90, 10), 100, 5, False, torch.device("meta"))
    assert offsets.draw(40, seeded(), 6).shape == (40,)
