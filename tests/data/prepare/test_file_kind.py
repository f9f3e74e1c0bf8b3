"""What a file is follows from its content, then from its name."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from memtrain.data.prepare import prepare_images, prepare_path, prepare_text, prepare_tokens
from memtrain.data.prepare.cache import prepared_store
from memtrain.data.prepare.file_kind import detect, kind_of, require_kind
from memtrain.errors import MemtrainError


def png(gray: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(gray).save(buffer, "PNG")
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


PNG = png(np.zeros((2, 2), np.uint8))
TEXT = b"Some words, a line.\n" * 20


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.txt", TEXT, "text"),
        ("a", b"", "text"),
        ("a.py", TEXT, "text"),
        ("a.txt", "Ünïcödé".encode(), "text"),
        ("a.txt", "é".encode() * 40_000, "text"),  # the head ends within a character
        ("a.txt", "Latin é".encode("latin-1"), "text"),
        ("a.txt", b"BMW and other cars.", "text"),
        ("a.jsonl", b'{"text": "a"}', "jsonl"),
        ("a.NDJSON", b'{"text": "a"}', "jsonl"),
        ("a.json", b"[]", "json"),
        ("a.csv", b"a,b\n", "csv"),
        ("a.tsv", b"a\tb\n", "tsv"),
        ("a.txt", b"\x1f\x8b\x08", "gzip"),
        ("a.zip", b"PK\x03\x04", "zip"),
        ("whatever", npy(np.arange(3)), "npy"),
        ("a.parquet", b"PAR1\x15", "parquet"),
    ],
)
def test_readable_files_are_recognised(name: str, content: bytes, format: str):
    kind = detect(name, content[: 2**16])
    assert kind.format == format and kind.recipes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xz", b"\xfd7zXZ\0\0", "is xz-compressed; unpack it first"),
        ("a.txt", b"\x28\xb5\x2f\xfd\x04", "is zstd-compressed; unpack it first"),
        ("a.bz2", b"BZh91AY&SY", "is bzip2-compressed; unpack it first"),
        ("a.tar.gz", b"\x1f\x8b\x08", "is a tar archive; unpack it first"),
        ("a.txt", PNG, "is a PNG image; memtrain train images --data FOLDER reads a folder or zip"),
        ("a.jpg", b"\xff\xd8\xff\xe0", "is a JPEG image; memtrain train images --data FOLDER"),
        ("a.gif", b"GIF89a", "is a GIF image; memtrain train images --data FOLDER reads a folder"),
        ("a", b"RIFF\x24\0\0\0WEBPVP8 ", "is a WebP image; memtrain train images --data FOLDER"),
        ("a", b"BM\x46\0\0\0\0\0\0\0\x36", "is a BMP image; memtrain train images --data FOLDER"),
        ("a.tif", b"II*\0\x08", "is a TIFF image; convert it to PNG"),
        ("a.bmp", TEXT, "is not a BMP image, though its name ends in .bmp"),
        ("a.webp", TEXT, "is not a WebP image, though its name ends in .webp"),
        ("a.pdf", b"%PDF-1.7", "is a PDF document; convert it to text first"),
        ("a.docx", b"PK\x03\x04", "is an office document; convert it to text first"),
        ("a.npz", b"PK\x03\x04", "is an .npz archive; save one array of tokens: np.save("),
        ("a.txt", "two words".encode("utf-16"), "is UTF-16 text; convert it: iconv"),
        ("a.txt", b"a\0b", "is neither text nor"),
        ("a", bytes(range(1, 256)) * 9, "is neither text nor"),
        ("a.png", TEXT, "is not a PNG image, though its name ends in .png"),
        ("a.gz", TEXT, "is not gzipped text, though its name ends in .gz"),
    ],
)
@pytest.mark.parametrize("function", [prepare_path, prepare_text, prepare_images, prepare_tokens])
def test_unsupported_files_come_with_a_remedy(
    tmp_path: Path, function, name: str, content: bytes, message: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MemtrainError) as caught:
        function(tmp_path / name, tmp_path / "out")
    assert f"{name}: {message}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "name", "content", "right"),
    [
        ("images", "a.txt", TEXT, "is text; memtrain train text --data a.txt"),
        ("tokens", "a.csv", TEXT, "is CSV; memtrain train text --data a.csv"),
        ("text", "a.npy", npy(np.arange(99)), "is a NumPy array; memtrain train tokens --data a"),
        ("text", "a.zip", b"PK\x03\x04", "is a zip; memtrain train images --data a.zip; texts in"),
        ("tokens", "train.bin", b"\0\1", "is nanoGPT's tokens; name its folder, with train.bin"),
        ("text", "a.png", PNG, "is a PNG image; memtrain train images --data FOLDER"),
    ],
)
def test_the_wrong_recipe_names_the_right_one(
    tmp_path: Path, monkeypatch, recipe: str, name: str, content: bytes, right: str
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(MemtrainError) as caught:
        prepared_store(recipe, Path(name), {}, Path("data"))
    assert f"{name}: {right}" in str(caught.value)


def test_mixed_folder_has_the_kind_of_most_files_and_both_recipes_read_their_part(tmp_path: Path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(np.full((2, 2), 250 + number, np.uint8)))
        (folder / f"{number}.txt").write_bytes(TEXT * (number + 1))
    assert kind_of(folder).recipes == ("images", "text")  # as many captions as images
    store = prepare_path(folder, tmp_path / "a")
    assert store.meta.picture is not None
    assert store.meta.notes == (
        f"read as images; it holds text too: memtrain train text --data {folder}",
        "passed over 4 files: 4 .txt",
    )
    (folder / "README.md").write_bytes(TEXT * 9)
    store = prepare_path(folder, tmp_path / "b")
    assert store.meta.text and store.meta.notes == (
        f"read as text; it holds images too: memtrain train images --data {folder}",
        "read 4 .txt, 1 .md",
        "passed over 4 files: 4 .png",
    )
    assert prepare_images(folder, tmp_path / "c").meta.picture is not None


def test_a_folder_of_one_kind_is_refused_by_the_other_recipes(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    with pytest.raises(MemtrainError, match="is a folder of text; memtrain train text --data"):
        require_kind(tmp_path, "images")
    with pytest.raises(MemtrainError, match="is a folder of text; memtrain train text --data"):
        require_kind(tmp_path, "tokens")
    (tmp_path / "a.txt").rename(tmp_path / "a.xyz")
    with pytest.raises(MemtrainError, match=r"without text or images; .* \(it holds \.xyz\)"):
        require_kind(tmp_path, "images")


def test_a_zip_without_images_error_names_its_content(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", TEXT)
    with pytest.raises(MemtrainError, match=r"a.zip: holds no image to read \(but 1 \.txt\)"):
        prepare_path(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [((9,), "tokens"), ((3, 3), "tokens"), ((2, 3, 4), "images"), ((2, 3, 4, 3), "images")],
)
def test_the_dimensions_of_an_array_decide_its_recipe(shape: tuple[int, ...], recipe: str):
    assert detect("a.npy", npy(np.zeros(shape, np.uint8))).recipes == (recipe,)
    assert detect("a.npy", npy(np.zeros(shape, np.uint8))[:20]).recipes == ("tokens",)  # damaged


def test_arrays_that_are_not_tokens_come_with_a_remedy(tmp_path: Path):
    path = tmp_path / "a.npy"
    path.write_bytes(npy(np.zeros((9, 4, 4), np.int64)))
    with pytest.raises(MemtrainError, match="images are uint8, or floats in 0..1; array.astype"):
        prepare_path(path, tmp_path / "out")
    path.write_bytes(npy(np.zeros(9)))
    with pytest.raises(MemtrainError, match=r"must be whole numbers.*np.save\('tokens.npy', array"):
        prepare_path(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.npy", "a.txt", "a.txt.gz", "a.zip", "a.parquet", "a.png"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "zero" / name):
        for function in (prepare_path, prepare_text, prepare_images, prepare_tokens):
            with pytest.raises(MemtrainError, match="is not a regular file"):
                function(path, tmp_path / "out")
    with pytest.raises(MemtrainError, match="is a folder without text or images"):
        prepare_path(tmp_path / "zero", tmp_path / "out")
