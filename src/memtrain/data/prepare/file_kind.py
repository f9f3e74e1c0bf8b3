"""Detect the kind of a file, by its content first, then by its name, and the recipe for it."""

import codecs
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from numpy.lib import format as npy

from memtrain.data.prepare.arrow_files import ARROW_FILE, ARROW_STREAM
from memtrain.data.prepare.hugging_face import hub_name, is_saved_dataset
from memtrain.data.prepare.limits import list_files, one_line, suffix_of
from memtrain.errors import MemtrainError
from memtrain.files import open_regular

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
IMAGE_FORMATS = "PNG, JPEG, WebP, BMP or GIF"
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Files whose rows are documents."""
_SOURCES = """
txt text md markdown rst org adoc tex bib html htm css scss
py pyi c h cc cpp cxx hh hpp cu cuh m mm rs go java kt kts scala groovy swift cs fs
js jsx mjs cjs ts tsx vue svelte rb php pl pm lua r jl hs ml mli ex exs erl clj lisp el scm
sh bash zsh fish bat ps1 sql proto cmake gradle toml yaml yml ini cfg conf vim
"""
SOURCE_SUFFIXES = tuple(f".{end}" for end in _SOURCES.split())
"""Texts, markup and programs; each file is a document."""
TEXT_SUFFIXES = (*SOURCE_SUFFIXES, *RECORD_SUFFIXES)
"""The text files of a folder, also with .gz; a single file may have any name."""
NANOGPT = ("train.bin", "val.bin")
"""The files of a folder that nanoGPT's prepare.py wrote."""
HEAD = 2**16
"""Bytes that detection reads."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a file or folder."""

    format: str
    """text, jsonl, csv, tsv, json, parquet, arrow, gzip, zip, npy, folder, nanogpt, dataset (saved
    by Hugging Face's datasets), hub (a name on the Hub); "" if nothing reads it."""
    description: str
    """As in "is a PNG image"."""
    recipes: tuple[str, ...] = ()
    """The recipes that read it, of text, images and tokens, the best first."""
    remedy: str = ""
    """Advice if none does."""


def _unsupported(description: str, remedy: str) -> Kind:
    return Kind("", description, (), remedy)


_OF_IMAGES = "memtrain train images --data FOLDER reads a folder or zip of images"
_CONVERT_IMAGE = f"convert it to PNG: {_OF_IMAGES}"
_UNPACK = "unpack it first"
_TO_TEXT = "convert it to text first"
_ONE_ARRAY = "save one array of tokens: np.save('tokens.npy', array)"
_TOKENS = Kind("npy", "a NumPy array", ("tokens",))
_IMAGES = Kind("npy", "a NumPy array of three or four dimensions", ("images",))
_BMP = _unsupported("a BMP image", _OF_IMAGES)
_GZIP = Kind("gzip", "gzipped text", ("text",))
_ZIP = Kind("zip", "a zip", ("images",))
_PARQUET = Kind("parquet", "a parquet file", ("text",))
_ARROW = Kind("arrow", "an Arrow file", ("text",))


_MAGIC: tuple[tuple[int, bytes, tuple[str, ...], Kind], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", (".png",), _unsupported("a PNG image", _OF_IMAGES)),
    (0, b"\xff\xd8\xff", (".jpg", ".jpeg"), _unsupported("a JPEG image", _OF_IMAGES)),
    (0, b"GIF87a", (".gif",), _unsupported("a GIF image", _OF_IMAGES)),
    (0, b"GIF89a", (".gif",), _unsupported("a GIF image", _OF_IMAGES)),
    (8, b"WEBP", (".webp",), _unsupported("a WebP image", _OF_IMAGES)),
    (0, b"II*\0", (), _unsupported("a TIFF image", _CONVERT_IMAGE)),
    (0, b"MM\0*", (), _unsupported("a TIFF image", _CONVERT_IMAGE)),
    (0, b"PK\x03\x04", (".zip",), _ZIP),
    (0, b"PK\x05\x06", (".zip",), _ZIP),
    (0, b"\x1f\x8b", (".gz",), _GZIP),
    (0, b"\xfd7zXZ\0", (".xz",), _unsupported("xz-compressed", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", (".zst",), _unsupported("zstd-compressed", _UNPACK)),
    (4, b"1AY&SY", (".bz2",), _unsupported("bzip2-compressed", _UNPACK)),
    (0, b"\x04\x22\x4d\x18", (".lz4",), _unsupported("lz4-compressed", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", (".7z",), _unsupported("a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", (".rar",), _unsupported("a RAR archive", _UNPACK)),
    (257, b"ustar", (".tar",), _unsupported("a tar archive", _UNPACK)),
    (0, b"%PDF-", (".pdf",), _unsupported("a PDF document", _TO_TEXT)),
    (0, b"{\\rtf", (".rtf",), _unsupported("an RTF document", _TO_TEXT)),
    (0, b"\xd0\xcf\x11\xe0", (".doc", ".xls"), _unsupported("an office document", _TO_TEXT)),
    (0, b"\x93NUMPY", (".npy",), _TOKENS),
    (0, b"PAR1", (".parquet",), _PARQUET),
    (0, ARROW_FILE, (".arrow",), _ARROW),
    (0, b"\x89HDF\r\n", (".h5", ".hdf5"), _unsupported("an HDF5 file", _ONE_ARRAY)),
    (0, b"SQLite format 3\0", (), _unsupported("an SQLite database", "export the texts as CSV")),
)
"""Offset, magic bytes, file names that must have them, and kind."""
_ZIPS = {
    **dict.fromkeys(
        (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub"),
        _unsupported("an office document", _TO_TEXT),
    ),
    ".npz": _unsupported("an .npz archive", _ONE_ARRAY),
    **dict.fromkeys((".pt", ".pth"), _unsupported("a PyTorch file", _ONE_ARRAY)),
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
    """Detect the kind of a file or folder."""
    if hub_name(path):
        return Kind("hub", "a Hugging Face dataset", ("text",))
    if path.is_dir():
        return _kind_of_folder(path)
    try:
        with open_regular(path) as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        raise MemtrainError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise MemtrainError(f"{path}: {error.strerror or error}") from None
    return detect(path.name, head)


def detect(name: str, head: bytes) -> Kind:
    """Detect the kind of a file by its name and first bytes."""
    suffix = PurePosixPath(name).suffix.lower()
    for offset, magic, _, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            if kind is _GZIP and name.lower().endswith((".tar.gz", ".tgz")):
                return _unsupported("a tar archive", _UNPACK)
            if kind is _TOKENS and _dimensions(head) in (3, 4):
                return _IMAGES
            return _ZIPS.get(suffix, kind) if kind is _ZIP else kind
    if head.startswith(b"BM") and head[6:10] == bytes(4):  # text may start with BM, too
        return _BMP
    if suffix == ".arrow" and head.startswith(ARROW_STREAM):
        return _ARROW
    for suffixes, kind in (*((ends, kind) for _, _, ends, kind in _MAGIC), ((".bmp",), _BMP)):
        if suffix in suffixes:
            remedy = "it is damaged, cut short or misnamed: get it again, or rename it"
            return _unsupported(f"not {kind.description}, though its name ends in {suffix}", remedy)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _unsupported("UTF-16 text", _UTF16)
    if not looks_like_text(head):
        if name in NANOGPT:
            return _unsupported(
                "nanoGPT's tokens", f"name its folder, with {' and '.join(NANOGPT)}"
            )
        remedy = "supported: text, JSONL, CSV, parquet, Arrow, .npy, folders or zips of images"
        return _unsupported("neither text nor of another known kind", remedy)
    return _RECORDS.get(suffix, _TEXT)


def _dimensions(head: bytes) -> int:
    """The number of dimensions of a .npy file; 0 if its header is damaged."""
    file = io.BytesIO(head)
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        return len(read[npy.read_magic(file)](file)[0])
    except Exception:  # numpy evaluates the header as Python source
        return 0


def looks_like_text(head: bytes) -> bool:
    """Whether bytes may be UTF-8, or text in an encoding of one byte per character."""
    if 0 in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        # Text has almost no control characters but line ends; random bytes have 8 %.
        controls = sum(head.count(code) for code in range(1, 32) if code not in b"\t\n\r\f\b\x1b")
        return 100 * controls <= len(head)
    return True


def require_kind(path: Path, recipe: str) -> Kind:
    """Refuse a file that a recipe (text, images, tokens, or "" for any) does not read."""
    kind = kind_of(path)
    if not kind.recipes:
        raise MemtrainError(f"{path}: is {kind.description}; {kind.remedy}")
    if recipe and recipe not in kind.recipes:
        unpack = "; texts in it: unpack it first" if (recipe, kind) == ("text", _ZIP) else ""
        raise MemtrainError(
            f"{path}: is {kind.description}; memtrain train {kind.recipes[0]} --data {path}{unpack}"
        )
    return kind


def mixed_note(path: Path, kind: Kind, recipe: str) -> tuple[str, ...]:
    """A note on the other recipe that could read a folder, if there is one."""
    shown = one_line(str(path))
    return tuple(
        f"read as {recipe}; it holds {other} too: memtrain train {other} --data {shown}"
        for other in kind.recipes
        if other != recipe
    )


def is_image_name(name: str) -> bool:
    """Whether a file of a folder or zip is read as an image."""
    return suffix_of(name) in IMAGE_SUFFIXES


def is_text_name(name: str) -> bool:
    """Whether a file of a folder is read as text."""
    return suffix_of(name).removesuffix(".gz") in TEXT_SUFFIXES


def _kind_of_folder(folder: Path) -> Kind:
    """Images if there are at least as many as texts, which may be their captions; else text.

    A saved dataset and nanoGPT's files are recognized by the names of their files.
    """
    if is_saved_dataset(folder):
        return Kind("dataset", "a Hugging Face dataset", ("text",))
    names = list_files(folder).names
    if set(NANOGPT) <= set(names):
        others = ("text",) if any(map(is_text_name, names)) else ()
        return Kind("nanogpt", "a folder of nanoGPT's tokens", ("tokens", *others))
    counts = Counter("images" if is_image_name(name) else "text" for name in names if is_read(name))
    recipes = tuple(sorted(counts, key=lambda recipe: (-counts[recipe], recipe)))
    if not recipes:
        found = ", ".join(sorted({suffix_of(name) or "no suffix" for name in names})[:5])
        held = f" (it holds {found})" if names else ""
        shown = (".txt", ".md", ".py", "other texts and programs", *RECORD_SUFFIXES)
        remedy = f"{', '.join((*shown, *IMAGE_SUFFIXES))} are read{held}"
        return _unsupported("a folder without text or images", remedy)
    return Kind("folder", f"a folder of {' and '.join(recipes)}", recipes)


def is_read(name: str) -> bool:
    """Whether a file of a folder is read at all."""
    return is_image_name(name) or is_text_name(name)
