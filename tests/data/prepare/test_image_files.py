"""Pictures become tokens and back, and image files are read with care."""

import gzip
import io
import os
import resource
import struct
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import memtrain.data.prepare.image_files as image_files
from memtrain.data.images import ImageFormat, decode_images, encode_images
from memtrain.data.prepare import limits, zip_files
from memtrain.data.prepare.datasets import read_idx
from memtrain.data.prepare.image_files import read_folder
from memtrain.errors import MemtrainError

# ---------------------------------------------------------------------------- pixels and tokens


def test_256_levels_are_the_pixels_in_raster_order():
    gray = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert encode_images(gray).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_fewer_levels_take_the_nearest_grey():
    gray = np.array([[[0, 42, 43, 127, 128, 255]]], np.uint8)
    assert encode_images(gray, levels=4).tolist() == [[0, 0, 1, 1, 2, 3]]
    shown = decode_images(np.array([[0, 1, 2, 3]]), ImageFormat(height=1, width=4, levels=4))
    assert shown.tolist() == [[[0, 85, 170, 255]]]


def test_two_levels_are_ink_below_the_threshold():
    gray = np.array([[[0, 127, 128, 191, 192, 255]]], np.uint8)
    assert encode_images(gray, levels=2).tolist() == [[1, 1, 0, 0, 0, 0]]
    assert encode_images(gray, levels=2, threshold=192).tolist() == [[1, 1, 1, 1, 0, 0]]


def test_a_patch_is_read_from_the_top_left_as_the_highest_bit():
    ink = np.array(
        [
            [1, 0, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0, 1],
            [1, 1, 0, 0, 1, 0, 0, 0],
            [1, 1, 0, 0, 0, 1, 1, 1],
        ]
    )
    gray = np.where(ink, 0, 255).astype(np.uint8)[None]
    assert encode_images(gray, levels=2, patch=2).tolist() == [[8, 4, 2, 1, 15, 0, 9, 3]]


@pytest.mark.parametrize(("patch", "dtype"), [(2, np.uint8), (3, np.uint16), (4, np.uint16)])
def test_a_black_image_is_the_last_token(patch: int, dtype: type):
    tokens = encode_images(np.zeros((1, 12, 12), np.uint8), levels=2, patch=patch)
    assert tokens.dtype == dtype and set(tokens.flat) == {2**patch**2 - 1}


def test_patches_of_grey_levels_are_numbers_in_that_base():
    gray = np.array([[[0, 85, 255, 255], [170, 255, 0, 0]]], np.uint8)
    picture = ImageFormat(height=2, width=4, levels=4, patch=2)
    tokens = encode_images(gray, levels=4, patch=2)
    assert tokens.tolist() == [[0b00_01_10_11, 0b11_11_00_00]]
    assert picture.vocab_size == 256 and picture.length == 2
    assert np.array_equal(decode_images(tokens, picture), gray)
    widest = encode_images(np.full((1, 2, 2), 255, np.uint8), levels=16, patch=2)
    assert widest.tolist() == [[65535]]


@given(data=st.data(), levels=st.integers(2, 256))
def test_tokens_of_any_levels_survive(data, levels: int):
    picture = ImageFormat(height=2, width=3, levels=levels)
    tokens = data.draw(hnp.arrays(np.uint8, (2, 6), elements=st.integers(0, levels - 1)))
    gray = decode_images(tokens, picture)
    again = encode_images(gray, levels=levels)
    assert np.array_equal(again, tokens)
    assert np.array_equal(decode_images(again, picture), gray)


@given(data=st.data(), patch=st.integers(1, 4), threshold=st.integers(1, 255))
def test_binary_images_survive_any_patch(data, patch: int, threshold: int):
    ink = data.draw(hnp.arrays(bool, (2, 12, 12)))
    gray = np.where(ink, 0, 255).astype(np.uint8)
    tokens = encode_images(gray, levels=2, patch=patch, threshold=threshold)
    picture = ImageFormat(height=12, width=12, levels=2, patch=patch)
    assert tokens.shape == (2, picture.length) and tokens.max() < picture.vocab_size
    assert np.array_equal(decode_images(tokens, picture), gray)


@given(hnp.arrays(np.uint8, (1, 3, 4)))
def test_every_grey_image_survives_256_levels(gray: np.ndarray):
    assert np.array_equal(decode_images(encode_images(gray), ImageFormat(height=3, width=4)), gray)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 1}, "levels=1: must be 2..256"),
        ({"levels": 257}, "levels=257"),
        ({"patch": 2}, "levels=256 with patch=2: 4,294,967,296 tokens, at most 65,536"),
        ({"patch": 5, "levels": 2}, "patch=5: must be 1..4"),
        ({"patch": 3, "levels": 2}, "patch=3: must divide the image, 4x6"),
        ({"threshold": 9}, "only for levels=2"),
        ({"threshold": 0, "levels": 2}, "threshold=0: must be 1..255"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str):
    with pytest.raises(MemtrainError, match=message):
        encode_images(np.zeros((1, 4, 6), np.uint8), **options)


def test_tokens_that_are_not_an_image_are_refused():
    picture = ImageFormat(height=2, width=2, levels=4)
    with pytest.raises(MemtrainError, match="has 4 tokens, not 3"):
        decode_images(np.zeros((1, 3), np.int64), picture)
    for bad in (4, -1):
        with pytest.raises(MemtrainError, match=r"must be 0\.\.3"):
            decode_images(np.full((1, 4), bad), picture)
    with pytest.raises(MemtrainError, match="height=0"):
        ImageFormat(height=0, width=2)


# ------------------------------------------------------------------------------------------- IDX


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("array", [IMAGES, np.array([3, 1, 4], np.uint8)], ids=["images", "labels"])
def test_idx_files_are_read_plain_and_gzipped(tmp_path: Path, array: np.ndarray):
    (tmp_path / "plain").write_bytes(idx(array))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(idx(array)))
    assert np.array_equal(read_idx(tmp_path / "plain"), array)
    assert np.array_equal(read_idx(tmp_path / "zipped.gz"), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"GIF89a", "starts with 47494638"),
        (idx(IMAGES, 0xD03), "starts with 00000d03"),
        (idx(IMAGES)[:10], "cut short in its header"),
        (idx(IMAGES)[:-1], "claims 24 bytes, it holds 23"),
        (idx(IMAGES) + b"!", "claims 24 bytes, it holds more"),
        (idx(IMAGES[:0]), "claims .* 0 bytes"),
        (struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "header claims"),
    ],
)
def test_bad_idx_files_are_refused(tmp_path: Path, content: bytes, message: str):
    for path, written in (("plain", content), ("zipped.gz", gzip.compress(content))):
        (tmp_path / path).write_bytes(written)
        with pytest.raises(MemtrainError, match=message):
            read_idx(tmp_path / path)


def test_an_idx_file_that_unpacks_to_too_much_is_refused(tmp_path: Path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 2**10, 2**10, 2**10) + bytes(2**20)))
    with pytest.raises(MemtrainError, match="its header claims .* 1,073,741,824 bytes"):
        read_idx(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MemtrainError, match="not a regular file"):
        read_idx(tmp_path / "pipe")


def test_a_gzipped_idx_file_cut_short_is_refused(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (9, 28, 28), np.uint8)
    path = tmp_path / "cut.gz"
    for cut in (3, 1000, -3):
        path.write_bytes(gzip.compress(idx(noise))[:cut])
        with pytest.raises(MemtrainError, match="cut.gz: damaged or cut short"):
            read_idx(path)
    with pytest.raises(MemtrainError, match="No such file"):
        read_idx(tmp_path / "none.gz")


# ------------------------------------------------------------------------------ folders and zips


def png(gray: np.ndarray, kind: str = "PNG") -> bytes:
    return encoded(Image.fromarray(gray), kind)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A tiny PNG whose header lies about its size."""
    data = bytearray(png(np.zeros((2, 2), np.uint8)))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def put(place: Path, files: dict[str, bytes]) -> Path:
    """The files, in a zip if the place is called one, else in a folder."""
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return place
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


PLACES = pytest.mark.parametrize("place", ["folder", "files.zip"])
FIRST = np.arange(6, dtype=np.uint8).reshape(2, 3)


@PLACES
def test_images_are_read_in_sorted_order(tmp_path: Path, place: str):
    files = {
        "b/two.PNG": png(FIRST + 1),
        "a/one.png": png(FIRST),
        "a/notes.txt": b"no image",
        "a/._one.png": b"what macOS adds",
        "three.jpeg": png(np.full((2, 3), 200, np.uint8), "JPEG"),
    }
    found = read_folder(put(tmp_path / place, files))
    assert found.names == ("a/one.png", "b/two.PNG", "three.jpeg")
    assert np.array_equal(found.pixels[:2], [FIRST, FIRST + 1])
    assert np.abs(found.pixels[2].astype(int) - 200).max() <= 2
    assert found.skipped == ()


@PLACES
def test_unreadable_files_are_named_and_skipped(tmp_path: Path, place: str):
    files = {
        "cut.png": png(np.random.default_rng(0).integers(0, 256, (9, 9), np.uint8))[:-40],
        "empty.jpg": b"",
        "tiff.png": encoded(Image.fromarray(FIRST), "TIFF"),
        "good.png": png(FIRST),
        "text.png": b"no image",
    }
    found = read_folder(put(tmp_path / place, files))
    assert found.names == ("good.png",)
    assert found.skipped == ("cut.png", "empty.jpg", "text.png", "tiff.png")


@PLACES
def test_mixed_sizes_are_refused_without_a_size_option(tmp_path: Path, place: str):
    path = put(tmp_path / place, {"a.png": png(FIRST), "b.png": png(FIRST.T.copy())})
    with pytest.raises(MemtrainError, match="mixed sizes, a.png is 2x3 and b.png is 3x2"):
        read_folder(path)
    assert read_folder(path, (4, 5)).pixels.shape == (2, 4, 5)


def test_resizing_is_lanczos(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 30), np.uint8)
    found = read_folder(put(tmp_path / "folder", {"a.png": png(noise)}), (8, 6))
    expected = Image.fromarray(noise).resize((6, 8), Image.Resampling.LANCZOS)
    assert np.array_equal(found.pixels[0], np.asarray(expected))


def test_only_accepted_names_are_read(tmp_path: Path):
    path = put(tmp_path / "folder", {"a.png": png(FIRST), "b.png": b"never looked at"})
    found = read_folder(path, accept=lambda name: name == "a.png")
    assert found.names == ("a.png",) and found.skipped == ()


def test_transparent_colour_deep_and_rotated_images_become_grey(tmp_path: Path):
    clear = np.zeros((2, 3, 4), np.uint8)  # black, but wholly transparent
    clear[0, 0, 3] = 255
    turned = Image.Exif()
    turned[0x112] = 6  # to be shown turned by 90 degrees
    files = {
        "clear.png": encoded(Image.fromarray(clear)),
        "deep.png": encoded(Image.fromarray(np.full((2, 3), 0x8012, np.uint16))),
        "red.png": encoded(Image.new("RGB", (3, 2), "red")),
        "turned.jpg": encoded(Image.new("L", (2, 3), 90), "JPEG", exif=turned),
    }
    clear_gray, deep, red, turned_gray = read_folder(put(tmp_path / "folder", files)).pixels
    assert clear_gray.tolist() == [[0, 255, 255], [255, 255, 255]]
    assert (deep == 0x80).all()
    assert (red == 76).all()
    assert (turned_gray == 90).all()


@PLACES
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF"])
def test_every_lossless_format_has_the_same_pixels(tmp_path: Path, place: str, kind: str):
    gray = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    options = {"lossless": True} if kind == "WEBP" else {}
    files = {f"a.{kind.lower()}": encoded(Image.fromarray(gray), kind, **options)}
    found = read_folder(put(tmp_path / place, files))
    assert np.array_equal(found.pixels, gray[None]) and not found.animated


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_is_read(tmp_path: Path, kind: str):
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue", "green")]
    more = {"save_all": True, "append_images": frames[1:]}
    more |= {"lossless": True} if kind == "WEBP" else {}
    files = {f"a.{kind.lower()}": encoded(frames[0], kind, **more), "b.png": png(FIRST)}
    found = read_folder(put(tmp_path / "folder", files), colour=True)
    assert (found.pixels[0] == [255, 0, 0]).all() and found.animated == 1


def test_colours_are_kept_and_transparency_is_white(tmp_path: Path):
    half = np.full((2, 3, 4), (200, 0, 0, 128), np.uint8)
    half[0, 0, 3] = 0
    palette = Image.new("P", (3, 2), 1)
    palette.putpalette([0, 0, 255, 0, 200, 0])
    palette.putpixel((0, 0), 0)
    files = {
        "a-half.png": encoded(Image.fromarray(half)),
        "b-palette.gif": encoded(palette, "GIF", transparency=0),
        "c-deep.png": encoded(Image.fromarray(np.full((2, 3), 0x8012, np.uint16))),
    }
    clear, indexed, deep = read_folder(put(tmp_path / "folder", files), colour=True).pixels
    assert clear[0, 0].tolist() == [255, 255, 255] and clear[1, 1].tolist() == [227, 127, 127]
    assert indexed[0, 0].tolist() == [255, 255, 255] and indexed[1, 1].tolist() == [0, 200, 0]
    assert (deep == 0x80).all()


def test_colours_that_are_lost_in_grey_are_counted(tmp_path: Path):
    files = {
        "a-grey.gif": png(np.tile(FIRST, (9, 9)) * 40, "GIF"),
        "b-grey.png": encoded(Image.fromarray(np.tile(FIRST, (9, 9)) * 40).convert("RGBA")),
        "c-red.webp": encoded(Image.new("RGB", (3, 2), "red"), "WEBP"),
        "d-blue.gif": encoded(Image.new("RGB", (3, 2), "blue"), "GIF"),
    }
    path = put(tmp_path / "folder", files)
    assert read_folder(path, (2, 2)).coloured == 2
    assert read_folder(path, (2, 2), colour=True).coloured == 0


def test_digests_are_of_the_pixels_before_resizing(tmp_path: Path):
    wide = np.repeat(FIRST, 2, axis=1)
    files = {
        "a.png": png(FIRST),
        "b.bmp": png(FIRST, "BMP"),
        "c.png": png(FIRST.reshape(3, 2)),
        "d.png": png(wide),
    }
    a, b, c, d = read_folder(put(tmp_path / "folder", files), (2, 2)).digests
    assert a == b and len({a, c, d}) == 3


def bmp_that_claims(side: int) -> bytes:
    data = bytearray(png(FIRST, "BMP"))
    data[18:26] = struct.pack("<ii", side, side)
    return bytes(data)


def gif_that_claims(side: int) -> bytes:
    data = bytearray(png(FIRST, "GIF"))
    data[6:10] = struct.pack("<HH", side, side)
    return bytes(data)


def webp_that_claims(side: int) -> bytes:
    data = bytearray(encoded(Image.fromarray(FIRST), "WEBP", lossless=True))
    packed = int.from_bytes(data[21:25], "little") & ~(2**28 - 1)
    data[21:25] = (packed | (side - 1) << 14 | (side - 1)).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bomb.bmp", bmp_that_claims(30_000)),
        ("bomb.gif", gif_that_claims(60_000)),
        ("bomb.webp", webp_that_claims(16_000)),
    ],
)
def test_bombs_of_other_formats_are_refused_from_their_headers(
    tmp_path: Path, name: str, content: bytes
):
    path = put(tmp_path / "folder", {name: content})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MemtrainError, match=f"{name}: refused, claims .* pixels"):
        read_folder(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@settings(max_examples=40)
@given(data=st.binary(max_size=60), kind=st.sampled_from(["GIF", "WEBP", "BMP"]))
def test_damaged_images_are_skipped(tmp_path_factory, data: bytes, kind: str):
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(png(np.tile(FIRST, (4, 4)), kind))
    content[30 : 30 + len(data)] = data
    (folder / f"a.{kind.lower()}").write_bytes(content)
    (folder / "b.png").write_bytes(png(np.tile(FIRST, (4, 4))))
    try:
        assert "b.png" in read_folder(folder, (4, 4)).names
    except MemtrainError as error:  # it claims to be too large
        assert "refused" in str(error)


@pytest.mark.parametrize("name", ["../evil.png", "a/../../evil.png", "/evil.png", "C:\\evil.png"])
def test_a_zip_with_paths_outside_its_folder_is_refused(tmp_path: Path, name: str):
    path = put(tmp_path / "files.zip", {"a.png": png(FIRST), name: png(FIRST)})
    with pytest.raises(MemtrainError, match="points outside of the zip"):
        read_folder(path)


def test_a_zip_that_unpacks_to_too_much_is_refused_before_it_is_read(tmp_path: Path, monkeypatch):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(2**20))
    monkeypatch.setattr(zip_files, "MAX_FILE_BYTES", 2**20 - 1)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was read"))
    with pytest.raises(MemtrainError, match="'a.png' unpacks to 1,048,576 bytes"):
        read_folder(path)


def test_a_zip_that_claims_more_bytes_than_it_has_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch
):
    path = put(tmp_path / "files.zip", {"a.png": png(FIRST)})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")  # of the directory: Python makes room for what it says
    content[entry + 20 : entry + 24] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(MemtrainError, match="'a.png' claims 2,147,483,647 bytes"):
        read_folder(path)


@pytest.mark.parametrize("side", [8193, 2**14, 2**31 - 1])
@PLACES
def test_an_image_bomb_is_refused_from_its_header(tmp_path: Path, place: str, side: int):
    path = put(tmp_path / place, {"a.png": png(FIRST), "bomb.png": png_that_claims(side, side)})
    with pytest.raises(MemtrainError, match="bomb.png: refused, claims .* pixels"):
        read_folder(path)


def test_a_truncated_or_invalid_zip_is_refused(tmp_path: Path):
    path = put(tmp_path / "files.zip", {"a.png": png(FIRST)})
    whole = path.read_bytes()
    for content in (whole[:-10], whole[:30]):
        path.write_bytes(content)
        with pytest.raises(MemtrainError, match="files.zip: not a zip, damaged or cut short"):
            read_folder(path)
    for content in (b"", b"no zip"):
        path.write_bytes(content)
        with pytest.raises(MemtrainError, match="is not a zip, though its name ends in .zip; it"):
            read_folder(path)


def test_a_damaged_file_of_a_zip_is_skipped(tmp_path: Path):
    path = put(tmp_path / "files.zip", {"a.png": png(FIRST), "b.png": png(FIRST + 1)})
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"IDAT") + 6] ^= 255
    path.write_bytes(whole)
    found = read_folder(path)
    assert found.names == ("b.png",) and found.skipped == ("a.png",)


PACKINGS = pytest.mark.parametrize(
    "packing",
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA],
    ids=["stored", "deflate", "bzip2", "lzma"],
)


def packed(path: Path, packing: int, content: dict[str, bytes]) -> bytearray:
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return bytearray(path.read_bytes())


@PACKINGS
def test_zips_of_every_packing_are_read_and_their_damage_is_skipped(tmp_path: Path, packing: int):
    noise = np.random.default_rng(0).integers(0, 256, (9, 9), np.uint8)
    path = tmp_path / "files.zip"
    whole = packed(path, packing, {"a.png": png(noise), "b.png": png(noise + 1)})
    assert np.array_equal(read_folder(path).pixels, [noise, noise + 1])
    place = 30 + len("a.png")
    for bad in (range(place, place + 12), range(place + 40, place + 60)):
        damaged = bytearray(whole)
        for byte in bad:
            damaged[byte] ^= 255
        path.write_bytes(damaged)
        found = read_folder(path)
        assert found.names == ("b.png",) and found.skipped == ("a.png",)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_a_packed_file_never_unpacks_to_more_than_it_claims(tmp_path: Path, packing: int):
    path = tmp_path / "files.zip"
    raw = packed(path, packing, {"a.png": bytes(2**25), "b.png": png(FIRST)})
    claimed = struct.pack("<L", 2**25)
    path.write_bytes(raw.replace(claimed, struct.pack("<L", 1000)))
    tracemalloc.start()
    found = read_folder(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.skipped == ("a.png",) and peak < 2**24


def test_a_zip_whose_files_overlap_is_refused(tmp_path: Path):
    path = tmp_path / "files.zip"
    raw = packed(path, zipfile.ZIP_DEFLATED, {"a.png": png(FIRST)})
    entry, end = raw[raw.index(b"PK\1\2") : raw.index(b"PK\5\6")], raw.index(b"PK\1\2")
    ending = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 300, 300, len(entry) * 300, end, 0)
    path.write_bytes(raw[:end] + entry * 300 + ending)
    with pytest.raises(MemtrainError, match="'a.png' and 'a.png' overlap"):
        read_folder(path)


def test_a_file_that_claims_more_bytes_than_its_zip_is_refused(tmp_path: Path):
    path = tmp_path / "files.zip"
    raw = packed(path, zipfile.ZIP_STORED, {"a.png": png(FIRST)})
    place = raw.index(b"PK\1\2") + 20
    raw[place : place + 4] = struct.pack("<L", 2**31)
    path.write_bytes(raw)
    with pytest.raises(MemtrainError, match="claims 2,147,483,648 bytes, more than the zip has"):
        read_folder(path)


def test_a_zip_is_bounded_as_a_whole(tmp_path: Path, monkeypatch):
    path = tmp_path / "files.zip"
    packed(path, zipfile.ZIP_DEFLATED, {f"{n}.png": bytes(2**20) for n in range(9)})
    monkeypatch.setattr(limits, "FREE", 2**22)
    with pytest.raises(MemtrainError, match="refused, unpacks to more than 4,194,304 bytes"):
        read_folder(path)
    monkeypatch.undo()
    monkeypatch.setattr(zip_files, "MAX_DIRECTORY_BYTES", 400)
    with pytest.raises(MemtrainError, match="its directory claims .* more than 400; unpack it"):
        read_folder(path)


@PLACES
def test_pixels_of_all_images_are_bounded(tmp_path: Path, monkeypatch, place: str):
    flat = png(np.zeros((512, 512), np.uint8))
    path = put(tmp_path / place, {f"{n}.png": flat for n in range(4)})
    monkeypatch.setattr(image_files, "FREE_PIXELS", 3 * 2**18)
    monkeypatch.setattr(image_files, "PIXELS_PER_BYTE", 10)
    with pytest.raises(MemtrainError, match="refused, claims more than 786,432 pixels in .* bytes"):
        read_folder(path, (8, 8))
    monkeypatch.setattr(image_files, "PIXELS_PER_BYTE", 10_000)
    assert read_folder(path, (8, 8)).pixels.shape == (4, 8, 8)


def test_only_resized_images_are_kept_in_memory(tmp_path: Path):
    path = put(
        tmp_path / "folder", {f"{n}.png": png(np.zeros((2000, 2000), np.uint8)) for n in "ab"}
    )
    tracemalloc.start()
    read_folder(path, (8, 8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21


@PLACES
def test_images_beyond_memory_are_refused_before_allocation(
    tmp_path: Path, monkeypatch, place: str
):
    path = put(tmp_path / place, {f"{n}.png": png(FIRST) for n in range(4)})
    monkeypatch.setattr(image_files, "MAX_BYTES", 20)
    with pytest.raises(MemtrainError, match="4 images of 2x3 pixels take 24 bytes, more than 20"):
        read_folder(path)
    monkeypatch.undo()
    monkeypatch.setattr(limits, "available_memory", lambda: 50)
    with pytest.raises(MemtrainError, match="GiB of memory or more.*resize them"):
        read_folder(path)
    with pytest.raises(MemtrainError, match="GiB of memory or more"):
        read_folder(path, (9, 9))


@pytest.mark.parametrize("side", [2**31, 100_000, 4097, 0, -1])
def test_an_absurd_size_is_refused(tmp_path: Path, side: int):
    path = put(tmp_path / "folder", {"a.png": png(FIRST)})
    with pytest.raises(MemtrainError, match=rf"size=4x{side}: must be 1\.\.4,096 pixels each"):
        read_folder(path, (4, side))


def test_dangling_links_and_cycles_are_ignored(tmp_path: Path):
    path = put(tmp_path / "folder", {"a.png": png(FIRST), "notes.txt": b"", ".hidden/b.png": b""})
    (path / ".#a.png").symlink_to("user@host.1234")
    (path / "b.png").symlink_to(path / "nothing")
    (path / "c").symlink_to(path)
    os.mkfifo(path / "d.png")
    found = read_folder(path)
    assert found.names == ("a.png",) and found.skipped == ()
    assert found.ignored == {
        ".txt": 1,
        "broken links": 1,
        "linked folders": 1,
        "special files": 1,
    }


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_FILES", 2)
    with pytest.raises(MemtrainError, match="holds more than 2 files"):
        read_folder(put(tmp_path / "folder", {f"{n}.png": b"" for n in range(3)}))


def test_no_image_at_all_is_refused(tmp_path: Path):
    with pytest.raises(MemtrainError, match="none: no such file or folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(MemtrainError, match="holds no image"):
        read_folder(tmp_path)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(MemtrainError, match="none of its 1 images can be read"):
        read_folder(tmp_path)
    with pytest.raises(MemtrainError, match=r"size=0x4: must be 1\.\.4,096 pixels each"):
        read_folder(tmp_path, (0, 4))


def test_images_without_pillow_name_the_package(tmp_path: Path, monkeypatch):
    put(tmp_path, {"a.png": png(FIRST)})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MemtrainError, match="pip install pillow"):
        read_folder(tmp_path)
