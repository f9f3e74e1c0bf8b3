"""The classes of images, from folders and from files of labels."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from memtrain.data.prepare import prepare, prepare_images
from memtrain.data.prepare.cache import SETTLED_SECONDS, prepare_source
from memtrain.data.prepare.image_classes import classes_of
from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError

NOISE = np.random.default_rng(0)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(NOISE.integers(0, 256, (2, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png())
    return folder


def firsts(store: Store) -> dict[str, list[str]]:
    """The classes of the images of each split, by their first tokens."""
    assert store.meta.picture is not None
    tokens = {
        split: store.tokens(split).reshape(-1, store.meta.document_length or 1)
        for split in store.splits
    }
    found = {}
    for split, rows in tokens.items():
        assert (rows[:, 1:] < store.meta.picture.vocab_size).all()
        numbers = rows[:, 0] - store.meta.picture.vocab_size
        assert np.array_equal(numbers, store.labels(split))
        found[split] = [store.meta.classes[number] for number in numbers]
    return found


def all_firsts(store: Store) -> list[str]:
    return sorted(label for labels in firsts(store).values() for label in labels)


def test_folders_are_classes(tmp_path: Path):
    names = ("cat/1.png", "cat/2.png", "cat/deep/3.png", "dog/1.png", "dog/2.png")
    store = prepare_images(put(tmp_path / "in", *names), tmp_path / "out", labels=True, levels=4)
    assert store.meta.classes == ("cat", "dog")
    assert (store.meta.vocab_size, store.meta.document_length) == (6, 7)
    assert all_firsts(store) == ["cat"] * 3 + ["dog"] * 2
    assert store.meta.notes == ("each image begins with its class, one of 2: cat, dog",)


def test_the_one_folder_of_a_zip_is_no_class(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("all/10/a.png", "all/9/b.png", "all/9/c.png"):
            archive.writestr(name, png())
    store = prepare_images(tmp_path / "a.zip", tmp_path / "out", labels=True)
    assert store.meta.classes == ("9", "10")  # in the order of numbers


def test_the_first_line_of_a_file_with_a_byte_order_mark_is_a_class(tmp_path: Path):
    folder = put(tmp_path / "in", *(f"{n}.png" for n in range(4)))
    lines = "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(4))
    (folder / "labels.csv").write_text(lines, encoding="utf-8-sig")
    store = prepare_images(folder, tmp_path / "out", labels="labels.csv")
    assert store.meta.classes == ("a", "b")


def test_lines_of_a_file_are_classes(tmp_path: Path):
    folder = put(tmp_path / "in", "a.png", "b/c.png", "b/d.png")
    lines = "file,label\na.png,red\nb/c.png,blue\nd.png,red\ngone.png,green\n"
    (folder / "labels.csv").write_text(lines)
    store = prepare_images(folder, tmp_path / "out", labels="labels.csv")
    assert store.meta.classes == ("blue", "red")
    assert all_firsts(store) == ["blue", "red", "red"]
    assert "1 lines of labels.csv name no image that was read" in store.meta.notes
    (tmp_path / "other.tsv").write_text(lines.replace(",", "\t"))
    again = prepare_images(folder, tmp_path / "again", labels=str(tmp_path / "other.tsv"))
    assert np.array_equal(again.tokens("train"), store.tokens("train"))


@pytest.mark.parametrize("name", ["a-labels.npy", "a_labels.npy", "a.labels.npy", "labels.npy"])
def test_labels_beside_an_array_are_found(tmp_path: Path, name: str):
    np.save(tmp_path / "a.npy", NOISE.integers(0, 256, (8, 2, 3), np.uint8))
    labels = np.array([3, 3, 10, 0, 0, 3, 3, 3])
    np.save(tmp_path / name, labels)
    store = prepare_images(tmp_path / "a.npy", tmp_path / "out", labels=True)
    assert store.meta.classes == ("0", "3", "10")
    assert all_firsts(store) == sorted(map(str, labels))


def test_labels_of_an_array_may_be_strings_in_a_named_file(tmp_path: Path):
    np.save(tmp_path / "a.npy", NOISE.integers(0, 256, (3, 2, 3), np.uint8))
    np.save(tmp_path / "y.npy", np.array(["x", "y", "x"]))
    store = prepare_images(tmp_path / "a.npy", tmp_path / "out", labels=str(tmp_path / "y.npy"))
    assert all_firsts(store) == ["x", "x", "y"]


def test_augmented_images_keep_their_class(tmp_path: Path):
    folder = put(tmp_path / "in", *(f"{kind}/{n}.png" for kind in "ab" for n in range(9)))
    store = prepare_images(folder, tmp_path / "out", labels=True, mirror=True)
    found = firsts(store)["train"]
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_sketchy_has_classes(tmp_path: Path):
    folder = put(tmp_path / "in", "cat/n1_1-1.png", "cat/n1_2-1.png", "dog/n2_1-1.png")
    store = prepare("sketchy", data_dir=folder, out=tmp_path / "out", labels=True)
    assert store.meta.classes == ("cat", "dog") and store.meta.document_length == 1025


def test_a_store_without_classes_is_as_before(tmp_path: Path):
    folder = put(tmp_path / "in", "cat/1.png", "dog/1.png")
    store = prepare_images(folder, tmp_path / "out")
    plain = (store.folder / "meta.json").read_text()
    assert '"classes"' not in plain and '"palette"' not in plain
    assert open_store(store.folder).meta.classes == ()
    assert not (store.folder / "train.labels.npy").exists()


def test_changed_labels_are_prepared_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.cache.SETTLED_SECONDS", -SETTLED_SECONDS)
    folder = put(tmp_path / "in", "a.png", "b.png", "c.png")
    file = tmp_path / "labels.csv"
    file.write_text("a.png,x\nb.png,y\nc.png,y\n")
    options = {"labels": str(file)}
    first, new = prepare_source(folder, options, tmp_path / "data", "images")
    assert new
    assert prepare_source(folder, options, tmp_path / "data", "images") == (first, False)
    file.write_text("a.png,y\nb.png,x\nc.png,y\n")
    other, new = prepare_source(folder, options, tmp_path / "data", "images")
    assert new and other.folder != first.folder


BAD = {
    "one folder": ("true", "a.png b.png", "2 of 2 images are in no folder of a class (a.png, b"),
    "one class": ("true", "a/a.png a/b.png", "2 of 2 images are in no folder of a class"),
    "gone": ("gone.csv", "a.png", "labels=gone.csv: no such file; true takes the names of folders"),
    "empty": ("", "a.png b.png", "must be lines of FILE,CLASS: --option labels labels.csv"),
    "bare": ("a.png\nb.png", "a.png b.png", "must be lines of FILE,CLASS: --option labels labels"),
    "few": ("a.png,x", "a.png b.png", "1 of 2 images have no class (b.png); add lines of FILE,"),
    "two": ("a.png,x\na.png,y", "a.png b.png", "a.png is 'x' and 'y'; an image has one class"),
    "same": ("a.png,x\nb.png,x", "a.png b.png", "1 classes of 2 images; must be 2..4,096"),
}


@pytest.mark.parametrize("case", BAD)
def test_images_without_classes_are_refused(tmp_path: Path, monkeypatch, case: str):
    monkeypatch.chdir(tmp_path)
    content, names, message = BAD[case]
    folder = put(Path("in"), *names.split())
    labels: bool | str = content == "true" or "labels.csv"
    if content in ("true", "gone.csv"):
        labels = content == "true" or content
    else:
        Path("labels.csv").write_text(content)
    with pytest.raises(MemtrainError) as caught:
        prepare_images(folder, Path("out"), labels=labels)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(3, int), "int64 of shape (3,): must be whole numbers or strings of shape (2,)"),
        (np.zeros(2), "float64 of shape (2,): must be whole numbers or strings"),
        (np.zeros((2, 1), int), "must be whole numbers or strings of shape (2,)"),
        (np.zeros(2, int), "1 classes of 2 images; must be 2..4,096"),
        (None, "there is no a-labels.npy beside a.npy; save it there, or name the file"),
    ],
)
def test_labels_that_do_not_fit_an_array_are_refused(
    tmp_path: Path, monkeypatch, labels: np.ndarray | None, message: str
):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", NOISE.integers(0, 256, (2, 2, 3), np.uint8))
    if labels is not None:
        np.save("labels.npy", labels)
    with pytest.raises(MemtrainError) as caught:
        prepare_images(Path("a.npy"), Path("out"), labels=True)
    assert message in str(caught.value)


def test_more_classes_than_tokens_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("memtrain.data.prepare.image_store.MAX_VOCAB", 2**16)
    folder = put(tmp_path / "in", "a/1.png", "b/1.png")
    with pytest.raises(MemtrainError, match="and 2 classes: 65,538 tokens, at most 65,536"):
        prepare_images(folder, tmp_path / "out", labels=True, size=4, levels=16, patch=2)
    with pytest.raises(MemtrainError, match="5,000 classes of 5,000 images; must be 2..4,096"):
        classes_of([str(n) for n in range(5000)], "labels")
