"""What a file is: by its content first, then by its name; and which recipe reads it."""

import codecs
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memtrain.data.prepare.limits import list_files, show, suffix_of
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""What is read of a folder of texts, and the same with .gz; a single file may have any name."""
HEAD = 2**16
"""Bytes from which a file is recognised."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file or folder is."""

    format: str
    """text, jsonl, csv, tsv, json, parquet, gzip, zip, npy, folder; "" if nothing reads it."""
    said: str
    """As in "is a PNG image"."""
    recipes: tuple[str, ...] = ()
    """Of text, images and tokens those that read it, the best first."""
    remedy: str = ""
    """What to do if none does."""


_OF_IMAGES = "memtrain train images --data FOLDER reads a folder or zip of PNG and JPEG files"
_CONVERT_IMAGE = f"convert it to PNG: {_OF_IMAGES}"
_UNPACK = "unpack it first"
_TO_TEXT = "convert it to text first"
_ONE_ARRAY = "save one array of tokens: np.save('tokens.npy', array)"
_TOKENS = Kind("npy", "a NumPy array", ("tokens",))
_GZIP = Kind("gzip", "gzipped text", ("text",))
_ZIP = Kind("zip", "a zip", ("images",))
_PARQUET = Kind("parquet", "a parquet file", ("text",))


def _none(said: str, remedy: str) -> Kind:
    return Kind("", said, (), remedy)


_MAGIC: tuple[tuple[int, bytes, tuple[str, ...], Kind], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", (".png",), _none("a PNG image", _OF_IMAGES)),
    (0, b"\xff\xd8\xff", (".jpg", ".jpeg"), _none("a JPEG image", _OF_IMAGES)),
    (0, b"GIF87a", (), _none("a GIF image", _CONVERT_IMAGE)),
    (0, b"GIF89a", (), _none("a GIF image", _CONVERT_IMAGE)),
    (0, b"II*\0", (), _none("a TIFF image", _CONVERT_IMAGE)),
    (0, b"MM\0*", (), _none("a TIFF image", _CONVERT_IMAGE)),
    (0, b"PK\x03\x04", (".zip",), _ZIP),
    (0, b"PK\x05\x06", (".zip",), _ZIP),
    (0, b"\x1f\x8b", (".gz",), _GZIP),
    (0, b"\xfd7zXZ\0", (".xz",), _none("xz-compressed", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", (".zst",), _none("zstd-compressed", _UNPACK)),
    (4, b"1AY&SY", (".bz2",), _none("bzip2-compressed", _UNPACK)),
    (0, b"\x04\x22\x4d\x18", (".lz4",), _none("lz4-compressed", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", (".7z",), _none("a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", (".rar",), _none("a RAR archive", _UNPACK)),
    (257, b"ustar", (".tar",), _none("a tar archive", _UNPACK)),
    (0, b"%PDF-", (".pdf",), _none("a PDF document", _TO_TEXT)),
    (0, b"{\\rtf", (".rtf",), _none("an RTF document", _TO_TEXT)),
    (0, b"\xd0\xcf\x11\xe0", (".doc", ".xls"), _none("an office document", _TO_TEXT)),
    (0, b"\x93NUMPY", (".npy",), _TOKENS),
    (0, b"PAR1", (".parquet",), _PARQUET),
    (0, b"ARROW1", (".arrow",), _none("an Arrow file", "write it as parquet or JSONL")),
    (0, b"\x89HDF\r\n", (".h5", ".hdf5"), _none("an HDF5 file", _ONE_ARRAY)),
    (0, b"SQLite format 3\0", (), _none("an SQLite database", "export the texts as CSV")),
)
"""Offset, bytes there, names that promise them, and what they mean."""
_ZIPS = {
    **dict.fromkeys(
        (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub"), _none("an office document", _TO_TEXT)
    ),
    ".npz": _none("an .npz archive", _ONE_ARRAY),
    **dict.fromkeys((".pt", ".pth"), _none("a PyTorch file", _ONE_ARRAY)),
}
_RECORDS = {
    ".jsonl": Kind("jsonl", "JSONL", ("text",)),
    ".ndjson": Kind("jsonl", "JSONL", ("text",)),
    ".json": Kind("json", "JSON", ("text",)),
    ".csv": Kind("csv", "CSV", ("text",)),
    ".tsv": Kind("tsv", "TSV", ("text",)),
}
_TEXT = Kind("text", "text", ("text",))
_UTF16 = "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"


def kind_of(path: Path) -> Kind:
    """What a file or folder is.

    Raises:
        MemtrainError: it is not there, cannot be read, or is a pipe or a device.
    """
    if path.is_dir():
        return _kind_of_folder(path)
    try:
        with open_regular(path) as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    return recognise(path.name, head)


def recognise(name: str, head: bytes) -> Kind:
    """What a file of this name and these first bytes is."""
    suffix = PurePosixPath(name).suffix.lower()
    for offset, magic, _, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            if kind is _GZIP and name.lower().endswith((".tar.gz", ".tgz")):
                return _none("a tar archive", _UNPACK)
            return _ZIPS.get(suffix, kind) if kind is _ZIP else kind
    for _, _, suffixes, kind in _MAGIC:
        if suffix in suffixes:
            remedy = "it is damaged, cut short or misnamed: get it again, or rename it"
            return _none(f"not {kind.said}, though its name ends in {suffix}", remedy)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _none("UTF-16 text", _UTF16)
    if not looks_like_text(head):
        remedy = "text, JSONL, CSV, parquet, .npy, and folders or zips of PNG and JPEG files are"
        return _none("neither text nor of another known kind", f"{remedy} read")
    return _RECORDS.get(suffix, _TEXT)


def looks_like_text(head: bytes) -> bool:
    """Whether bytes may be text in UTF-8, or in an encoding of one byte per character."""
    if 0 in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        # Texts have no control characters but for line ends and the like; other bytes have 8 %.
        controls = sum(head.count(code) for code in range(1, 32) if code not in b"\t\n\r\f\b\x1b")
        return 100 * controls <= len(head)
    return True


def require_kind(path: Path, recipe: str) -> Kind:
    """Refuse what a recipe does not read, naming what it is and what reads it.

    Args:
        path: a file or folder.
        recipe: text, images or tokens; "" for any of them.
    """
    kind = kind_of(path)
    if not kind.recipes:
        raise MemtrainError(f"{path}: is {kind.said}; {kind.remedy}")
    if recipe and recipe not in kind.recipes:
        raise MemtrainError(
            f"{path}: is {kind.said}; memtrain train {kind.recipes[0]} --data {path}"
        )
    return kind


def mixed_note(path: Path, kind: Kind, recipe: str) -> tuple[str, ...]:
    """A note on what else a recipe could have read of a folder, if there is anything."""
    others = [other for other in kind.recipes if other != recipe]
    return tuple(
        f"read as {recipe}; it holds {other} too: memtrain train {other} --data {show(str(path))}"
        for other in others
    )


def is_image_name(name: str) -> bool:
    """Whether a file of a folder or zip is read as an image."""
    return suffix_of(name) in IMAGE_SUFFIXES


def is_text_name(name: str) -> bool:
    """Whether a file of a folder is read as text."""
    return suffix_of(name).removesuffix(".gz") in TEXT_SUFFIXES


def _kind_of_folder(folder: Path) -> Kind:
    """Images if there are as many as texts, which may be their captions; else text."""
    names = list_files(folder).names
    counts = Counter("images" if is_image_name(name) else "text" for name in names if is_read(name))
    recipes = tuple(sorted(counts, key=lambda recipe: (-counts[recipe], recipe)))
    if not recipes:
        found = ", ".join(sorted({suffix_of(name) or "no suffix" for name in names})[:5])
        held = f" (it holds {found})" if names else ""
        remedy = f"{', '.join((*TEXT_SUFFIXES, *IMAGE_SUFFIXES))} are read{held}"
        return _none("a folder without text or images", remedy)
    return Kind("folder", f"a folder of {' and '.join(recipes)}", recipes)


def is_read(name: str) -> bool:
    """Whether a file of a folder is read at all."""
    return is_image_name(name) or is_text_name(name)
