"""Data sets become stores: MNIST, TinyStories, Sketchy, and files of the user's own.

Each `prepare_...` reads its files, writes a store to `out` and returns it opened. Whatever goes
wrong is one line of a `MemtrainError`, and nothing is left behind.
"""

import hashlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data import download
from memtrain.data.pictures import Picture, Pictures, encode_pictures, read_folder, read_idx
from memtrain.data.store import Split, Store, StoreMeta, check_place, open_array, write_store
from memtrain.data.text import (
    SEPARATOR_TOKEN,
    TEXT_VOCAB,
    EncodedText,
    encode_text,
    read_text,
    read_texts,
)
from memtrain.errors import MemtrainError, nearest

SKETCHY_NAME = re.compile(r"(?P<photo>.+)-\d+\.png")


def prepare(
    name: str, *, data_dir: Path | None = None, out: Path, overwrite: bool = False, **options: Any
) -> Store:
    """Prepare one of the paper's data sets.

    Args:
        name: mnist, tinystories or sketchy.
        data_dir: the folder with its files; without it they are downloaded.
        out: the store's folder.
        overwrite: replace a store that is there.
        options: what the data set's own function takes.
    """
    if name not in DATA_SETS:
        raise MemtrainError(f"data set {name!r}: {nearest(name, DATA_SETS)}")
    function = DATA_SETS[name]
    check_options(function, options)
    return function(data_dir, out, overwrite=overwrite, **options)


def check_options(function: Callable[..., Store], options: Iterable[str]) -> None:
    """Refuse an option that a `prepare_...` does not take, with the nearest that it does."""
    known = inspect.signature(function).parameters.keys()
    known = known - {"data_dir", "path", "out", "overwrite"}
    what = function.__name__.removeprefix("prepare_")
    for option in options:
        if option not in known:
            raise MemtrainError(f"{option}: {what} has no such option; {nearest(option, known)}")


# ------------------------------------------------------------------------ the paper's data sets


def prepare_mnist(
    data_dir: Path | None,
    out: Path,
    *,
    levels: int = 256,
    patch: int = 1,
    overwrite: bool = False,
) -> Store:
    """MNIST's 28x28 digits, 256 grey levels in raster order. Its labels are not read.

    Args:
        data_dir: holds the IDX files of the images.
        out: the store's folder.
        levels: grey levels; 4 with patch 2 make 196 tokens of 256 a digit.
        patch: side of the squares that make one token.
        overwrite: replace a store that is there.
    """
    picture = Picture(height=28, width=28, levels=levels, patch=patch)
    check_place(out, overwrite)
    with _mnist_files(data_dir) as files:
        splits = {}
        for split, path in zip(("train", "test"), files, strict=True):
            gray = read_idx(path)
            if gray.shape[1:] != (28, 28):
                raise MemtrainError(f"{path}: shape {gray.shape}, MNIST's images are 28x28")
            tokens = encode_pictures(gray, levels=levels, patch=patch)
            splits[split] = Split(tokens.reshape(-1))
    meta = StoreMeta(
        name="mnist",
        vocab_size=picture.vocab_size,
        source=f"MNIST (LeCun and Cortes), from {data_dir or download.MNIST_URL}",
        document_length=picture.length,
        picture=picture,
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def prepare_tinystories(
    data_dir: Path | None, out: Path, *, separator: bool = False, overwrite: bool = False
) -> Store:
    """TinyStories as ASCII characters. The stories are joined directly, as in the paper.

    Args:
        data_dir: holds train and valid as .txt, .txt.gz or parquet.
        out: the store's folder.
        separator: put token 0 between stories.
        overwrite: replace a store that is there.
    """
    check_place(out, overwrite)
    splits, notes = {}, []
    for split, paths in zip(("train", "test"), _tinystories_files(data_dir), strict=True):
        encoded = _encode(read_texts(paths), "ascii", separator, ", ".join(map(str, paths)))
        splits[split] = Split(encoded.tokens, encoded.starts)
        notes += _dropped(encoded, f"{split}: ")
    meta = StoreMeta(
        name="tinystories",
        vocab_size=TEXT_VOCAB,
        source=f"TinyStories (Eldan and Li 2023), from {data_dir or download.TINYSTORIES_REPO}",
        text=True,
        separator=SEPARATOR_TOKEN if separator else None,
        notes=tuple(notes),
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def prepare_sketchy(
    data_dir: Path | None,
    out: Path,
    *,
    threshold: int = 192,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Sketchy's sketches at 64x64 (Lanczos), binarised, as 1,024 tokens of 2x2 pixels.

    All sketches of one photo are alike, so a photo is in train or in test with all of them.

    Args:
        data_dir: a zip or folder of `<class>/<photo>-<number>.png`, or a folder with one.
        out: the store's folder.
        threshold: darker is ink. Resizing leaves thin strokes grey: at 128 they break into dashes.
        held_out: share of the photos in test; a photo's side follows from its name.
        overwrite: replace a store that is there.
    """
    check_place(out, overwrite)
    _check_share(held_out)
    if data_dir is None:
        raise MemtrainError(
            "sketchy: has no direct download; get the sketches (256x256 PNG) from "
            "https://sketchy.eye.gatech.edu and pass --data-dir FOLDER"
        )
    path = _sketchy_files(data_dir)
    pictures = read_folder(path, (64, 64), accept=lambda name: _photo(name) is not None)
    picture, tokens = _spell(pictures, levels=2, patch=2, threshold=threshold)
    photos = [_photo(name) or "" for name in pictures.names]
    held = _held_out_names(photos, held_out)
    meta = StoreMeta(
        name="sketchy",
        vocab_size=picture.vocab_size,
        source=f"Sketchy (Sangkloy et al. 2016), from {path}",
        document_length=picture.length,
        picture=picture,
        notes=(
            *_skipped(pictures),
            f"ink: grey below {threshold}",
            f"split by photo: {len(set(photos)) - len(held):,} in train, {len(held):,} in test",
        ),
    )
    splits = _split_pictures(tokens, [photo in held for photo in photos])
    return write_store(out, meta, splits, overwrite=overwrite)


DATA_SETS: dict[str, Callable[..., Store]] = {
    "mnist": prepare_mnist,
    "tinystories": prepare_tinystories,
    "sketchy": prepare_sketchy,
}


# ---------------------------------------------------------------------------- files of one's own


def prepare_path(path: Path, out: Path, *, overwrite: bool = False, **options: Any) -> Store:
    """Prepare files of the user's by what they are: text, images or a .npy of tokens."""
    if path.suffix == ".npy":
        function = prepare_tokens
    elif path.suffix == ".zip" or (path.is_dir() and _holds_images(path)):
        function = prepare_images
    else:
        function = prepare_text
    check_options(function, options)
    return function(path, out, overwrite=overwrite, **options)


def _holds_images(folder: Path) -> bool:
    return any(path.suffix.lower() in (".png", ".jpg", ".jpeg") for path in folder.rglob("*"))


def prepare_text(
    path: Path,
    out: Path,
    *,
    mode: str = "bytes",
    separator: bool = False,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Any text file or folder of them; see `read_text` and `encode_text`.

    The last share of the documents is held out; of a single document, its last bytes.
    """
    check_place(out, overwrite)
    _check_share(held_out)
    encoded = _encode(read_text(path), mode, separator, str(path))
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=TEXT_VOCAB,
        source=str(path),
        text=True,
        separator=SEPARATOR_TOKEN if separator else None,
        notes=_dropped(encoded, ""),
    )
    splits = _split_stream(encoded.tokens, encoded.starts, held_out)
    return write_store(out, meta, splits, overwrite=overwrite)


def prepare_images(
    path: Path,
    out: Path,
    *,
    size: int | tuple[int, int] | None = None,
    levels: int = 256,
    patch: int = 1,
    threshold: int | None = None,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Any folder or zip of PNG and JPEG files, in grey; see `read_folder` and `encode_pictures`.

    Args:
        path: the folder or zip.
        out: the store's folder.
        size: (height, width), or one number for both, to resize to.
        levels: grey levels.
        patch: side of the squares that make one token.
        threshold: darker is ink; needs two levels.
        held_out: share of the images in test; an image's side follows from its name.
        overwrite: replace a store that is there.
    """
    check_place(out, overwrite)
    _check_share(held_out)
    pictures = read_folder(path, (size, size) if isinstance(size, int) else size)
    picture, tokens = _spell(pictures, levels=levels, patch=patch, threshold=threshold)
    held = _held_out_names(pictures.names, held_out)
    splits = _split_pictures(tokens, [name in held for name in pictures.names])
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=picture.vocab_size,
        source=str(path),
        document_length=picture.length,
        picture=picture,
        notes=_skipped(pictures),
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def prepare_tokens(
    path: Path,
    out: Path,
    *,
    vocab_size: int | None = None,
    held_out: float = 0.1,
    overwrite: bool = False,
) -> Store:
    """Any .npy of tokens: one stream (1-D), or documents of one length (2-D).

    The last share of the documents is held out; of a stream, its last tokens.
    """
    check_place(out, overwrite)
    _check_share(held_out)
    try:
        array = open_array(path)
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise MemtrainError(f"{path}: {download.first_line(error)}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise MemtrainError(
            f"{path}: {array.dtype} of shape {array.shape}: must be whole numbers, "
            "1-D (a stream) or 2-D (documents x length)"
        )
    if not array.size:
        raise MemtrainError(f"{path}: holds no tokens, at least 4 are needed, 2 a split")
    low, high = int(array.min()), int(array.max())
    if low < 0:
        raise MemtrainError(f"{path}: holds {low}; tokens are 0 or more")
    if vocab_size is not None and high >= vocab_size:
        raise MemtrainError(f"vocab_size={vocab_size}: {path} holds the token {high}")
    meta = StoreMeta(
        name=path.resolve().stem,
        vocab_size=high + 1 if vocab_size is None else vocab_size,
        source=str(path),
        document_length=array.shape[1] if array.ndim == 2 else None,
    )
    if array.ndim == 1:
        splits = _split_stream(array, np.zeros(1, np.int64), held_out)
    else:
        count = _held_out_count(len(array), held_out, f"{path}: documents")
        rows = {"train": array[:-count], "test": array[-count:]}
        splits = {name: Split(part.reshape(-1)) for name, part in rows.items()}
    return write_store(out, meta, splits, overwrite=overwrite)


# ------------------------------------------------------------------------- encoding and splitting


def _encode(raw: bytes, mode: str, separator: bool, where: str) -> EncodedText:
    try:
        return encode_text(raw, mode, separator=separator)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def _dropped(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def _spell(
    pictures: Pictures, *, levels: int, patch: int, threshold: int | None
) -> tuple[Picture, Integer[np.ndarray, "N L"]]:
    _, height, width = pictures.gray.shape
    picture = Picture(height=height, width=width, levels=levels, patch=patch)
    return picture, encode_pictures(pictures.gray, levels=levels, patch=patch, threshold=threshold)


def _skipped(pictures: Pictures) -> tuple[str, ...]:
    if not pictures.skipped:
        return ()
    named = ", ".join(pictures.skipped[:5]) + (", ..." if len(pictures.skipped) > 5 else "")
    return (f"skipped {len(pictures.skipped):,} unreadable files: {named}",)


def _split_stream(
    tokens: Integer[np.ndarray, " N"], starts: Int64[np.ndarray, " K"], share: float
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one."""
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        whole = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], whole), "test": Split(tokens[cut:], whole)}
    first = len(starts) - _held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


def _split_pictures(tokens: Integer[np.ndarray, "N L"], held: Sequence[bool]) -> dict[str, Split]:
    mask = np.array(held)
    return {"train": Split(tokens[~mask].reshape(-1)), "test": Split(tokens[mask].reshape(-1))}


def _check_share(held_out: float) -> None:
    if not 0 < held_out < 1:
        raise MemtrainError(f"held_out={held_out}: must be above 0 and below 1; 0.1 is usual")


def _held_out_count(total: int, share: float, what: str) -> int:
    if total < 2:
        raise MemtrainError(f"{what}: {total}, at least 2 are needed to hold one out")
    return min(total - 1, max(1, round(share * total)))


def _held_out_names(names: Iterable[str], share: float) -> set[str]:
    """Which names are held out: a hash of each decides, so that others may come and go.

    Where that would leave a side empty, the name nearest to it changes sides.
    """
    rank = {n: int.from_bytes(hashlib.sha256(n.encode()).digest()[:8]) / 2**64 for n in names}
    _held_out_count(len(rank), share, "different images")
    held = {name for name, place in rank.items() if place < share}
    if not held:
        return {min(rank, key=rank.__getitem__)}
    if len(held) == len(rank):
        held.remove(max(rank, key=rank.__getitem__))
    return held


# -------------------------------------------------------------------------------- finding files


def _check_folder(name: str, data_dir: Path) -> None:
    if not data_dir.exists():
        raise MemtrainError(f"{name}: data_dir={data_dir}: no such folder")


@contextmanager
def _mnist_files(data_dir: Path | None) -> Iterator[list[Path]]:
    """The images of train and test."""
    if data_dir is None:
        with tempfile.TemporaryDirectory() as folder:
            yield download.download_mnist(Path(folder))
        return
    _check_folder("mnist", data_dir)
    found = [_first(data_dir, name, name.removesuffix(".gz")) for name in download.MNIST_SHA256]
    missing = [
        name for name, path in zip(download.MNIST_SHA256, found, strict=True) if path is None
    ]
    if missing:
        raise MemtrainError(f"mnist: {data_dir} has no {' and no '.join(missing)}")
    yield [path for path in found if path is not None]


def _tinystories_files(data_dir: Path | None) -> list[list[Path]]:
    """The files of train and of test."""
    if data_dir is None:
        return [[path] for path in download.download_tinystories()]
    _check_folder("tinystories", data_dir)
    found, missing = [], []
    for split in ("train", "valid"):
        stems = (f"{split}.txt", f"TinyStories-{split}.txt")
        text = _first(data_dir, *(stem + end for stem in stems for end in ("", ".gz")))
        tables = sorted(data_dir.glob(f"{split}*.parquet"))
        tables = tables or sorted(data_dir.glob(f"data/{split}*.parquet"))
        found.append([text] if text else tables)
        if not found[-1]:
            missing.append(f"{split}.txt, {split}.txt.gz or {split}*.parquet")
    if missing:
        raise MemtrainError(f"tinystories: {data_dir} has no {' and no '.join(missing)}")
    return found


def _sketchy_files(data_dir: Path) -> Path:
    """The zip or folder of sketches."""
    _check_folder("sketchy", data_dir)
    if data_dir.is_file():
        return data_dir
    # The database's own zip holds each sketch several times, moved and scaled: take the plain one.
    plain = ("256x256/sketch/tx_000000000000", "sketch/tx_000000000000", "sketch")
    known = _first(data_dir, "sketchy_256x256_png.zip", *plain)
    if known:
        return known
    zips = sorted(data_dir.glob("*.zip"))
    if len(zips) > 1:
        named = ", ".join(path.name for path in zips)
        raise MemtrainError(f"sketchy: {data_dir} has several zips ({named}); pass the one to read")
    return zips[0] if zips else data_dir


def _photo(name: str) -> str | None:
    """The photo that a sketch was drawn from; None for a file that is no sketch."""
    match = SKETCHY_NAME.fullmatch(PurePosixPath(name).name)
    return match and match["photo"]


def _first(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)
