"""Data sets become stores, whole or not at all, and what is wrong is one line."""

import gzip
import inspect
import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from memtrain.data.codec import decode_text
from memtrain.data.images import ImageFormat, decode_images
from memtrain.data.prepare import (
    DATA_SETS,
    NOT_OPTIONS,
    checked_options,
    prepare,
    prepare_images,
    prepare_path,
    prepare_text,
    prepare_tokens,
)
from memtrain.data.prepare.cache import prepared_store
from memtrain.data.prepare.encode import groups_of, held_out_names, split_stream
from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError

NOISE = np.random.default_rng(0)


def refusal(tmp_path: Path, call: Callable[[Path], object]) -> str:
    """The one line with which a call refuses; it must leave nothing where it was to write."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    with pytest.raises(MemtrainError) as caught:
        call(place / "out")
    assert list(place.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text(store: Store, split: str) -> str:
    return decode_text(store.tokens(split))


def png(gray: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(gray).save(buffer, "PNG")
    return buffer.getvalue()


# --------------------------------------------------------------------------------------- the door


def test_unknown_names_and_options_are_refused(tmp_path: Path):
    message = refusal(tmp_path, lambda out: prepare("mnits", out=out))
    assert "did you mean mnist?" in message
    message = refusal(tmp_path, lambda out: prepare("sketchy", out=out, treshold=3))
    assert "did you mean threshold?" in message
    message = refusal(tmp_path, lambda out: prepare("mnist", out=out, level=3))
    assert "did you mean levels?" in message


@pytest.mark.parametrize("name", ["mnist", "tinystories", "sketchy"])
def test_missing_folder_is_named(tmp_path: Path, name: str):
    message = refusal(tmp_path, lambda out: prepare(name, data_dir=tmp_path / "gone", out=out))
    assert f"{name}: data_dir={tmp_path / 'gone'}: no such folder" in message


# ----------------------------------------------------------------------------------------- MNIST


def idx(images: np.ndarray) -> bytes:
    return struct.pack(">4I", 0x803, *images.shape) + images.tobytes()


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">2I", 0x801, len(labels)) + bytes(labels)


TRAIN, TEST = NOISE.integers(0, 256, (3, 28, 28), np.uint8), np.zeros((1, 28, 28), np.uint8)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Three images to train, gzipped, and one to test, plain."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(TRAIN)))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(TEST))
    return folder


def test_mnist_is_its_pixels(tmp_path: Path, mnist: Path):
    store = prepare("mnist", data_dir=mnist, out=tmp_path / "out")
    assert (store.meta.vocab_size, store.meta.document_length) == (256, 784)
    assert store.meta.picture == ImageFormat(height=28, width=28, levels=256, patch=1)
    assert np.array_equal(store.tokens("train"), TRAIN.reshape(-1))
    assert (store.splits["train"].documents, store.splits["test"].documents) == (3, 1)


def test_mnist_keeps_its_labels(tmp_path: Path, mnist: Path):
    with pytest.raises(MemtrainError, match="has no labels .* prepare it again with --overwrite"):
        prepare("mnist", data_dir=mnist, out=tmp_path / "without").labels("train")
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_labels(7, 0, 9)))
    (mnist / "t10k-labels-idx1-ubyte").write_bytes(idx_labels(4))
    store = prepare("mnist", data_dir=mnist, out=tmp_path / "out")
    assert store.labels("train").tolist() == [7, 0, 9] and store.labels("test").tolist() == [4]


def test_mnist_digits_may_begin_with_their_class(tmp_path: Path, mnist: Path):
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out, labels=True))
    assert "labels=true: needs train-labels-idx1-ubyte.gz and t10k-labels-idx1-ubyte.gz" in message
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_labels(7, 0, 9)))
    (mnist / "t10k-labels-idx1-ubyte").write_bytes(idx_labels(4))
    plain = prepare("mnist", data_dir=mnist, out=tmp_path / "plain", levels=4, patch=2)
    store = prepare("mnist", data_dir=mnist, out=tmp_path / "out", levels=4, patch=2, labels=True)
    assert (store.meta.vocab_size, store.meta.document_length) == (266, 197)
    assert store.meta.classes == tuple("0123456789")
    images = store.tokens("train").reshape(3, 197)
    assert images[:, 0].tolist() == [263, 256, 265]
    assert np.array_equal(images[:, 1:].reshape(-1), plain.tokens("train"))
    assert store.labels("test").tolist() == [4]


def test_mnist_may_be_resized(tmp_path: Path, mnist: Path):
    store = prepare("mnist", data_dir=mnist, out=tmp_path / "out", size=14)
    assert store.meta.picture == ImageFormat(height=14, width=14)
    expected = Image.fromarray(TRAIN[1]).resize((14, 14), Image.Resampling.LANCZOS)
    assert np.array_equal(store.tokens("train")[196:392], np.asarray(expected).reshape(-1))
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out, size=0))
    assert "size=0x0: must be 1..4,096" in message


def test_mnist_refuses_labels_of_other_images(tmp_path: Path, mnist: Path):
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_labels(7, 0)))
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out))
    assert "train-labels-idx1-ubyte.gz: shape (2,)" in message and "has 3 images" in message


def test_mnist_names_its_missing_files(tmp_path: Path, mnist: Path):
    (mnist / "t10k-images-idx3-ubyte").unlink()
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out))
    assert "has no t10k-images-idx3-ubyte.gz" in message and "train-images" not in message


def test_mnist_cut_short_or_of_another_shape_is_refused(tmp_path: Path, mnist: Path):
    path = mnist / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out))
    assert f"{path}: damaged or cut short" in message
    path.write_bytes(gzip.compress(idx(TRAIN[:, :14])))
    message = refusal(tmp_path, lambda out: prepare("mnist", data_dir=mnist, out=out))
    assert "MNIST's images are 28x28" in message


def test_a_prepared_data_set_is_refused_before_its_files_are_read(tmp_path: Path, mnist: Path):
    prepare("mnist", data_dir=mnist, out=tmp_path / "out")
    (mnist / "train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(MemtrainError, match="is prepared already"):
        prepare("mnist", data_dir=mnist, out=tmp_path / "out")
    with pytest.raises(MemtrainError, match="damaged"):
        prepare("mnist", data_dir=mnist, out=tmp_path / "out", overwrite=True)
    assert len(open_store(tmp_path / "out", verify=True).tokens("train")) == 3 * 784


# ------------------------------------------------------------------------------------ TinyStories


@pytest.fixture
def tinystories(tmp_path: Path) -> Path:
    folder = tmp_path / "tinystories"
    folder.mkdir()
    stories = "One café.\n<|endoftext|>\nTwo.\n<|endoftext|>\nThree."
    (folder / "train.txt.gz").write_bytes(gzip.compress(stories.encode()))
    (folder / "valid.txt").write_text("All.\n\nIn one.\n")
    return folder


def test_tinystories_are_joined_ascii(tmp_path: Path, tinystories: Path):
    store = prepare("tinystories", data_dir=tinystories, out=tmp_path / "out")
    assert text(store, "train") == "One caf.\nTwo.\nThree."
    assert store.starts("train").tolist() == [0, 9, 14]
    assert text(store, "test") == "All.\n\nIn one.\n" and store.splits["test"].documents == 1
    assert (store.meta.vocab_size, store.meta.text, store.meta.separator) == (256, True, None)
    assert store.meta.notes == ("train: dropped 1 non-ASCII characters (2 bytes)",)


def test_tinystories_may_contain_invalid_utf8(tmp_path: Path, tinystories: Path):
    (tinystories / "valid.txt").write_bytes(b"x" * 70_000 + b"\0 \xff and more")
    store = prepare("tinystories", data_dir=tinystories, out=tmp_path / "out")
    assert store.meta.notes[1] == "test: dropped 1 non-ASCII characters (1 bytes)"


def test_tinystories_may_keep_a_separator(tmp_path: Path, tinystories: Path):
    store = prepare("tinystories", data_dir=tinystories, out=tmp_path / "out", separator=True)
    assert text(store, "train") == "One caf.\n\0Two.\n\0Three."
    assert store.meta.separator == 0 and store.starts("train").tolist() == [0, 10, 16]


def test_tinystories_names_its_missing_files(tmp_path: Path, tinystories: Path):
    (tinystories / "valid.txt").unlink()
    message = refusal(tmp_path, lambda out: prepare("tinystories", data_dir=tinystories, out=out))
    assert "has no valid.txt, valid.txt.gz or valid*.parquet" in message


@pytest.mark.parametrize("content", [b"", b"<|endoftext|>\n", "é".encode(), b"a"])
def test_a_short_text_error_names_the_tokens_needed(
    tmp_path: Path, tinystories: Path, content: bytes
):
    (tinystories / "valid.txt").write_bytes(content)
    message = refusal(tmp_path, lambda out: prepare("tinystories", data_dir=tinystories, out=out))
    assert "test would hold" in message and "at least 2 are needed" in message


def test_tinystories_may_be_parquet_in_several_files(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    files = {"train-0-of-2": ["a", "b"], "train-1-of-2": ["c"], "validation-0-of-1": ["dd"]}
    for name, rows in files.items():
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"{name}.parquet")
    store = prepare("tinystories", data_dir=tmp_path / "hub", out=tmp_path / "out")
    assert text(store, "train") == "a\nb\nc" and text(store, "test") == "dd"


# ---------------------------------------------------------------------------------------- Sketchy


def sketches(photos: int, each: int) -> dict[str, np.ndarray]:
    """Noise of few pixels, named as in the database."""
    return {
        f"sketch/c{photo % 3}/n{photo:03d}_7-{number}.png": NOISE.integers(
            0, 256, (64, 64), np.uint8
        )
        for photo in range(photos)
        for number in range(1, each + 1)
    }


def write_zip(path: Path, images: dict[str, np.ndarray]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, gray in images.items():
            archive.writestr(name, png(gray))
    return path


def rows(store: Store, split: str) -> set[bytes]:
    length = store.meta.document_length or 0
    return {row.tobytes() for row in store.tokens(split).reshape(-1, length)}


def test_a_zip_found_in_the_folder_is_prepared_once(tmp_path: Path):
    (tmp_path / "drawings").mkdir()
    write_zip(tmp_path / "drawings/any.zip", sketches(4, 2))
    first, second = [], []
    for notes in (first, second):
        drawings, root = tmp_path / "drawings", tmp_path / "data"
        prepared_store("sketchy", drawings, {}, root, notes.append)
    assert first[0].startswith("prepared") and not second


def test_sketchy_is_patches_of_ink_split_by_photo(tmp_path: Path):
    images = sketches(30, 3)
    write_zip(tmp_path / "sketchy_256x256_png.zip", images)
    write_zip(tmp_path / "another.zip", sketches(1, 1))
    store = prepare("sketchy", data_dir=tmp_path, out=tmp_path / "out", held_out=0.3)
    assert (store.meta.vocab_size, store.meta.document_length) == (16, 1024)
    picture = ImageFormat(height=64, width=64, levels=2, patch=2)
    assert store.meta.picture == picture
    shown = {
        split: decode_images(store.tokens(split).reshape(-1, 1024), picture)
        for split in ("train", "test")
    }
    sides: dict[str, set[str]] = {}
    for name, gray in images.items():
        ink = np.where(gray < 192, 0, 255)
        sides[name] = {split for split in shown if (shown[split] == ink).all((1, 2)).any()}
    assert all(len(side) == 1 for side in sides.values())
    for photo in range(30):
        together = [side for name, side in sides.items() if f"n{photo:03d}_" in name]
        assert len(together) == 3 and together.count(together[0]) == 3
    held = sum("test" in side for side in sides.values()) // 3
    assert 1 <= held < 30
    assert f"split by photo: {30 - held} in train, {held} in test" in store.meta.notes


@pytest.mark.parametrize("mirror", [False, True])
def test_sketchy_keeps_its_classes(mirror: bool, tmp_path: Path):
    shades = {"ant": 9, "bee": 255}
    images = {
        f"sketch/{kind}/n{number}_{kind}-1.png": np.full((64, 64), shade, np.uint8)
        for number in range(8)
        for kind, shade in shades.items()
    }
    path = write_zip(tmp_path / "s.zip", images)
    store = prepare("sketchy", data_dir=path, out=tmp_path / "out", held_out=0.3, mirror=mirror)
    for split in ("train", "test"):
        inked = store.tokens(split).reshape(-1, 1024)[:, 0] == 15
        assert store.labels(split).tolist() == np.where(inked, 0, 1).tolist()


def test_a_photo_stays_in_its_split_when_others_are_added(tmp_path: Path):
    images = sketches(30, 1)
    few = dict(list(images.items())[:20])
    stores = [
        prepare("sketchy", data_dir=write_zip(tmp_path / f"{n}.zip", part), out=tmp_path / f"o{n}")
        for n, part in enumerate((few, images))
    ]
    for split in ("train", "test"):
        assert rows(stores[0], split) <= rows(stores[1], split)


def test_sketchy_reads_folders_resizes_and_skips_photos(tmp_path: Path):
    plain = tmp_path / "db" / "256x256" / "sketch" / "tx_000000000000" / "cat"
    moved = tmp_path / "db" / "256x256" / "sketch" / "tx_000100000000" / "cat"
    for folder in (plain, moved):
        folder.mkdir(parents=True)
        for number in range(4):
            (folder / f"n1_{number}-1.png").write_bytes(png(np.full((256, 256), number, np.uint8)))
    (plain / "n1_9.png").write_bytes(png(np.zeros((8, 8), np.uint8)))  # no sketch's name
    (plain / "n1_8-2.png").write_bytes(b"damaged")
    store = prepare("sketchy", data_dir=tmp_path / "db", out=tmp_path / "out", held_out=0.5)
    assert sum(info.documents for info in store.splits.values()) == 4
    assert set(store.tokens("train")) == {15}
    assert store.meta.notes[0] == "skipped 1 unreadable file: cat/n1_8-2.png"


def test_the_threshold_is_an_option(tmp_path: Path):
    images = {f"cat/n{n}-1.png": np.full((64, 64), 150 + n, np.uint8) for n in range(9)}
    path = write_zip(tmp_path / "s.zip", images)
    broken = prepare("sketchy", data_dir=path, out=tmp_path / "a", threshold=128)
    whole = prepare("sketchy", data_dir=path, out=tmp_path / "b")
    assert set(broken.tokens("train")) == {0} and set(whole.tokens("train")) == {15}


def test_sketchy_refuses_unreadable_files(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()

    def message(**options) -> str:
        return refusal(
            tmp_path, lambda out: prepare("sketchy", data_dir=folder, out=out, **options)
        )

    assert "holds no image" in message()
    write_zip(folder / "one.zip", sketches(1, 2))
    assert "different images: 1, at least 2 are needed" in message()
    path = write_zip(folder / "one.zip", sketches(2, 1))
    assert "threshold=0" in message(threshold=0)
    assert "held_out=1.0: must be above 0 and below 1" in message(held_out=1.0)
    assert "held_out=nan" in message(held_out=float("nan"))
    write_zip(folder / "two.zip", sketches(1, 2))
    assert "has several zips (one.zip, two.zip)" in message()
    (folder / "two.zip").unlink()
    path.write_bytes(path.read_bytes()[:-30])
    assert "damaged or cut short" in message()
    without_folder = refusal(tmp_path, lambda out: prepare("sketchy", out=out))
    assert "no direct download" in without_folder and "--data-dir" in without_folder


@given(st.sets(st.text(), min_size=2), st.floats(0.01, 0.99))
def test_neither_side_of_a_split_by_name_is_empty(names: set[str], share: float):
    held = held_out_names(names, share)
    assert held and held < names
    assert held == held_out_names(sorted(names), share)


def test_a_split_by_name_holds_out_about_the_fraction_and_a_larger_one_includes_it():
    names = [f"{number}.png" for number in range(1000)]
    tenth, third = held_out_names(names, 0.1), held_out_names(names, 0.3)
    assert 70 < len(tenth) < 130 and 250 < len(third) < 350
    assert tenth < third


# ------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        ("bytes", "kept 40 bytes beyond ASCII; --option mode ascii drops them"),
        ("ascii", "dropped 20 non-ASCII characters (40 bytes)"),
    ],
)
def test_non_ascii_characters_are_counted_in_a_note(tmp_path: Path, mode: str, note: str):
    (tmp_path / "book.txt").write_text("café\n" * 20)
    store = prepare_text(tmp_path / "book.txt", tmp_path / "out", mode=mode)
    assert store.meta.notes == (note,)
    (tmp_path / "plain.txt").write_text("cafe\n" * 20)
    assert prepare_text(tmp_path / "plain.txt", tmp_path / "other", mode=mode).meta.notes == ()


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path):
    (tmp_path / "book.txt").write_text("é" + "x" * 88 + "0123456789")
    store = prepare_text(tmp_path / "book.txt", tmp_path / "out")
    assert text(store, "train") == "é" + "x" * 88 and text(store, "test") == "0123456789"
    assert (store.meta.name, store.meta.text) == ("book", True)


def test_the_last_documents_of_a_folder_are_held_out(tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"text {number}")
    store = prepare_text(folder, tmp_path / "out", separator=True, held_out=0.4)
    assert text(store, "train") == "text 0\n\0text 1\n\0"
    assert text(store, "test") == "text 2\n\0text 3"
    assert store.starts("test").tolist() == [0, 8]


@pytest.mark.parametrize(
    ("divider", "options", "documents"),
    [("***", {}, 3), ("---", {}, 0), ("§ ", {}, 2), ("§ ", {"mode": "ascii"}, 0)],
)
def test_a_divider_that_ends_no_document_is_in_a_note(
    tmp_path: Path, divider: str, options: dict, documents: int
):
    (tmp_path / "a.txt").write_text("one one\n***\ntwo two\n***\nthree\n§ \nfour four\n")
    store = prepare_text(tmp_path / "a.txt", tmp_path / "out", divider=divider, **options)
    note = f"no line is the divider {divider}, so it ends no document"
    assert (note in store.meta.notes) == (not documents)
    assert sum(info.documents for info in store.splits.values()) == (documents or 2)


@pytest.mark.parametrize("options", [{}, {"separator": True}])
def test_held_out_documents_that_are_in_train_are_counted_in_a_note(tmp_path: Path, options: dict):
    rows = [f"row {number}" for number in (*range(18), 3, 30)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    store = prepare_text(tmp_path / "a.jsonl", tmp_path / "out", **options)
    assert text(store, "test").replace("\0", "") == "row 3\nrow 30"
    note = "held-out documents that are in the training part too: 1 of 2; keep one of"
    assert store.meta.notes[-1].startswith(note)
    (tmp_path / "b.txt").write_text("row\n" * 40)  # of a single text, equal lines are usual
    assert prepare_text(tmp_path / "b.txt", tmp_path / "b", **options).meta.notes == ()


@given(count=st.integers(2, 30), share=st.floats(0.01, 0.99))
def test_every_document_is_in_exactly_one_split(count: int, share: float):
    lengths = NOISE.integers(1, 5, count)
    starts = np.cumsum(lengths) - lengths
    tokens = np.repeat(np.arange(count), lengths)
    splits = split_stream(tokens, starts, share)
    again = [splits[name].tokens[splits[name].starts].tolist() for name in ("train", "test")]
    assert again[0] + again[1] == list(range(count)) and all(again)


def test_bad_texts_and_options_are_refused(tmp_path: Path):
    path = tmp_path / "a.txt"

    def message(content: bytes, **options) -> str:
        path.write_bytes(content)
        return refusal(tmp_path, lambda out: prepare_text(path, out, **options))

    assert "train would hold 0 tokens, at least 2 are needed" in message(b"")
    assert "test would hold 1 token, at least 2 are needed" in message(b"ten bytes.")
    assert "held_out=0" in message(b"enough", held_out=0.0)
    assert "a.txt: mode='latin'" in message(b"enough", mode="latin")
    assert "a.txt: is neither text nor" in message(b"\0 enough", separator=True)
    assert "no such file" in refusal(tmp_path, lambda out: prepare_text(tmp_path / "b", out))


# ----------------------------------------------------------------------------------------- images


def test_user_images_become_a_store(tmp_path: Path):
    images = {f"{n}.png": NOISE.integers(0, 256, (4, 6), np.uint8) for n in range(20)}
    path = write_zip(tmp_path / "mine.zip", images)
    store = prepare_images(path, tmp_path / "out")
    assert store.meta.picture == ImageFormat(height=4, width=6)
    assert rows(store, "train") | rows(store, "test") == {g.tobytes() for g in images.values()}
    assert not rows(store, "train") & rows(store, "test")

    small = prepare_images(path, tmp_path / "small", size=8, levels=2, patch=4, held_out=0.5)
    assert small.meta.picture == ImageFormat(height=8, width=8, levels=2, patch=4)
    assert (small.meta.vocab_size, small.meta.document_length) == (65536, 4)
    tall = prepare_images(path, tmp_path / "tall", size=(6, 2), levels=4)
    assert tall.meta.picture == ImageFormat(height=6, width=2, levels=4)


def test_dark_images_of_12_bits_are_in_a_note(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        deep = NOISE.integers(2048, 4096, (4, 4)).astype(np.uint16)
        (folder / f"{number}.png").write_bytes(png(deep))
    notes = prepare_images(folder, tmp_path / "out").meta.notes
    assert "the brightest pixel is 15 of 255; scale the images if white is another value" in notes


def test_colour_images_become_a_store_with_a_palette_of_the_training_images(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for n in range(30):
        Image.new("RGB", (3, 2), (8 * n, 0, 255 - 8 * n)).save(folder / f"{n}.png")
    store = prepare_images(folder, tmp_path / "out", colour=True, levels=64, held_out=0.3)
    image = store.meta.picture
    assert image is not None and image.levels == len(image.palette) == store.meta.vocab_size
    train, test = (
        {tuple(one[0, 0].tolist()) for one in decode_images(store.tokens(s).reshape(-1, 6), image)}
        for s in ("train", "test")
    )
    assert len(train) == store.splits["train"].documents and train == set(image.palette)
    assert test <= train  # colours of held-out images are not in the palette
    assert store.meta.notes == (f"palette of {len(train)} colours, every pixel keeps its colour",)
    few = prepare_images(folder, tmp_path / "few", colour=True, levels=4)
    assert few.meta.notes[0].startswith("palette of 4 colours, off by ")
    assert open_store(few.folder).meta == few.meta


def test_equal_images_are_on_one_side_of_the_split(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for n in range(40):
        image = Image.fromarray(np.full((4, 6), 99 + n % 10, np.uint8))
        image.save(folder / f"{n:02d}.{('png', 'bmp', 'gif')[n % 3]}")
    store = prepare_images(folder, tmp_path / "out", held_out=0.3)
    assert rows(store, "train") | rows(store, "test") == {bytes([99 + n] * 24) for n in range(10)}
    assert not rows(store, "train") & rows(store, "test")
    note = "30 images repeat the pixels of another; equal images are all in train or all in test"
    assert store.meta.notes == (note,)


def test_without_equal_images_the_split_is_that_of_the_names(tmp_path: Path):
    images = {f"{n}.png": NOISE.integers(0, 256, (4, 6), np.uint8) for n in range(50)}
    store = prepare_images(write_zip(tmp_path / "mine.zip", images), tmp_path / "out")
    held = held_out_names(images, 0.1)
    assert rows(store, "test") == {images[name].tobytes() for name in held}


def test_groups_are_connected_by_keys_and_by_digests():
    keys, digests = ["d", "b", "d", "c", "a"], [b"1", b"2", b"2", b"3", b"4"]
    assert groups_of(keys, digests) == ["b", "b", "b", "c", "a"]


def test_equal_sketches_of_two_photos_are_on_one_side(tmp_path: Path):
    images = {f"cat/n{n}_1-1.png": np.full((64, 64), n // 2, np.uint8) for n in range(40)}
    path = write_zip(tmp_path / "s.zip", images)
    store = prepare("sketchy", data_dir=path, out=tmp_path / "a", threshold=10, held_out=0.4)
    assert store.splits["train"].documents % 2 == 0
    assert "20 images repeat the pixels of another" in store.meta.notes[0]


def test_options_that_colours_do_not_have_are_refused(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for n in range(3):
        Image.new("RGB", (4 + n, 4), "red").save(folder / f"{n}.png")

    def message(**options) -> str:
        options = {"colour": True, "size": 4} | options
        return refusal(tmp_path, lambda out: prepare_images(folder, out, **options))

    assert "patch=2 with colour: a colour token is one pixel; leave patch out" in message(patch=2)
    assert "threshold=9 with colour: is for grey; leave it out" in message(threshold=9)
    assert "levels=300 with colour: must be 2..256 colours" in message(levels=300)
    assert "levels=1 with colour: must be 2..256 colours" in message(levels=1)
    assert "the training images have one colour only" in message()


def test_bad_images_and_options_are_refused(tmp_path: Path):
    images = {"a.png": np.zeros((4, 6), np.uint8), "b.png": np.zeros((4, 7), np.uint8)}
    path = write_zip(tmp_path / "mine.zip", images)

    def message(**options) -> str:
        return refusal(tmp_path, lambda out: prepare_images(path, out, **options))

    assert "mixed sizes, a.png is 4x6 and b.png is 4x7" in message()
    assert "size=0x0" in message(size=0)
    assert "patch=3: must divide the image" in message(size=4, levels=2, patch=3)
    assert "only for levels=2" in message(size=4, threshold=9)
    assert "held_out=2" in message(held_out=2.0)


def test_names_of_files_are_shown_without_control_characters(tmp_path: Path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(NOISE.integers(0, 256, (4, 6), np.uint8)))
    (folder / "bad\x1b]0;title\x07\n.png").write_bytes(b"no image")
    (folder / "a.\x1b[2J").write_bytes(b"")
    store = prepare_images(folder, tmp_path / "out")
    assert store.meta.notes == (
        "skipped 1 unreadable file: bad\\x1b]0;title\\x07\\n.png",
        "passed over 1 file: 1 .\\x1b[2j",
    )


def test_file_names_that_are_not_utf8_are_accepted(tmp_path: Path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        name = os.fsencode(folder) + b"/\xff%d.png" % number
        Path(os.fsdecode(name)).write_bytes(png(NOISE.integers(0, 256, (4, 6), np.uint8)))
    assert prepare_images(folder, tmp_path / "out").splits["test"].documents == 1


# ----------------------------------------------------------------------------------------- tokens


def npy(tmp_path: Path, array: np.ndarray) -> Path:
    np.save(tmp_path / "tokens.npy", array)
    return tmp_path / "tokens.npy"


def test_a_stream_of_tokens_becomes_a_store(tmp_path: Path):
    store = prepare_tokens(npy(tmp_path, np.arange(300)), tmp_path / "out")
    assert (store.meta.vocab_size, store.meta.document_length) == (300, None)
    assert store.tokens("train").tolist() == list(range(270))
    assert store.tokens("test").tolist() == list(range(270, 300))


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_tokens_are_documents(tmp_path: Path, order):
    array = np.asarray(np.arange(12, dtype=np.uint16).reshape(4, 3), order=order)
    store = prepare_tokens(npy(tmp_path, array), tmp_path / "out", vocab_size=50)
    assert (store.meta.vocab_size, store.meta.document_length) == (50, 3)
    assert store.tokens("train").tolist() == list(range(9))
    assert store.tokens("test").tolist() == [9, 10, 11]


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (np.zeros(9), {}, "must be whole numbers"),
        (np.zeros(9, bool), {}, "must be whole numbers"),
        (np.zeros((2, 2, 2), int), {}, "of three or four dimensions; memtrain train images"),
        (np.zeros((2, 2, 2, 2, 2), int), {}, "1-D (a stream) or 2-D"),
        (np.zeros((), int), {}, "1-D (a stream) or 2-D"),
        (np.array([1, None]), {}, "not a .npy file of numbers"),
        (np.zeros(0, int), {}, "at least 4 are needed"),
        (np.zeros((3, 0), int), {}, "at least 4 are needed"),
        (np.array([1, 0, 1]), {}, "test would hold 0 tokens, at least 2 are needed"),
        (np.array([[1, 0, 1]]), {}, "documents: 1, at least 2 are needed"),
        (np.array([3, -1, 2, 2]), {}, "holds -1; tokens are 0 or more"),
        (np.array([3, 1, 2, 2]), {"vocab_size": 3}, "vocab_size=3: "),
        (np.array([3, 1, 2, 2]), {"vocab_size": 2**24 + 1}, "vocab_size=16777217: must be"),
        (np.array([3, 1, 2, 2**24]), {}, "the token 16,777,216; tokens are below 16,777,216"),
        (np.zeros(40, int), {}, "holds only zeros; there must be two different tokens"),
        (np.arange(40), {"held_out": 1.5}, "held_out=1.5"),
    ],
)
def test_bad_tokens_are_refused(tmp_path: Path, array: np.ndarray, options: dict, message: str):
    path = npy(tmp_path, array)
    assert message in refusal(tmp_path, lambda out: prepare_tokens(path, out, **options))


def test_bad_npy_files_are_refused(tmp_path: Path):
    path = npy(tmp_path, np.arange(100))
    whole = path.read_bytes()
    np.savez(tmp_path / "a.npz", np.arange(100))
    for content, words in (
        (whole[:-8], "not a .npy file of numbers, or cut short"),
        (whole[:9], "not a .npy file of numbers, or cut short"),
        (b"", "is not a NumPy array, though its name ends in .npy"),
        (b"no array", "is not a NumPy array, though its name ends in .npy"),
        ((tmp_path / "a.npz").read_bytes(), "is a zip; memtrain train images --data"),
    ):
        path.write_bytes(content)
        assert f"tokens.npy: {words}" in refusal(tmp_path, lambda out: prepare_tokens(path, out))
    path.unlink()
    assert "no such file" in refusal(tmp_path, lambda out: prepare_tokens(path, out))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (prepare_images, {"threshold": "abc"}, "threshold=abc: must be a whole number"),
        (prepare_images, {"size": "large"}, "size=large: must be a whole number or two whole"),
        (prepare_images, {"patch": 2.0}, "patch=2.0: must be a whole number"),
        (prepare_images, {"levels": True}, "levels=True: must be a whole number"),
        (prepare_images, {"mirror": 1}, "mirror=1: must be true or false"),
        (prepare_text, {"separator": "yes"}, "separator=yes: must be true or false"),
        (prepare_text, {"held_out": "much"}, "held_out=much: must be a number"),
        (prepare_text, {"mode": True}, "mode=True: must be a word"),
        (prepare_text, {"seperator": True}, "seperator: text has no such option"),
        (prepare_text, {"overwrite": True}, "overwrite: text has no such option"),
    ],
)
def test_other_kinds_of_data_are_refused_with_a_reason(function, options: dict, message: str):
    with pytest.raises(MemtrainError, match=message):
        checked_options(function, options)


def test_options_are_converted_to_their_types():
    assert checked_options(prepare_text, {"separator": "false"}) == {"separator": False}
    assert checked_options(prepare_text, {"separator": "True"}) == {"separator": True}
    (share,) = checked_options(prepare_text, {"held_out": 1}).values()
    assert share == 1.0 and type(share) is float
    assert checked_options(prepare_text, {"column": 1}) == {"column": "1"}
    assert checked_options(prepare_images, {"labels": 7}) == {"labels": "7"}
    assert checked_options(prepare_images, {"size": (3, 4), "threshold": None}) == {
        "size": (3, 4),
        "threshold": None,
    }


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_default_has_the_type_of_its_option(name: str):
    parameters = inspect.signature(DATA_SETS[name]).parameters
    options = {key: one.default for key, one in parameters.items() if key not in NOT_OPTIONS}
    assert options
    assert checked_options(DATA_SETS[name], options) == options


def test_false_is_parsed_as_false(tmp_path: Path):
    text = tmp_path / "two"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text(name * 200)
    with_zeros = prepare_path(text, tmp_path / "with", separator="true")
    without = prepare_path(text, tmp_path / "without", separator="false")
    assert with_zeros.meta.separator == 0 and without.meta.separator is None
