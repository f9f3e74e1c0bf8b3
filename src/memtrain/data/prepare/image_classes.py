"""The classes of images: from the names of their folders, or from a file of labels."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int64

from memtrain.data.prepare.file_kind import is_image_name
from memtrain.data.prepare.image_files import ImageSet
from memtrain.data.prepare.limits import name_some, one_line
from memtrain.data.store import open_array
from memtrain.errors import MemtrainError
from memtrain.files import read_text

MAX_CLASSES = 4096
MAX_LABEL_BYTES = 2**28
_LINES = "lines of FILE,CLASS: --option labels labels.csv"


@dataclass(frozen=True, slots=True)
class Classes:
    """The class of every image."""

    names: tuple[str, ...]
    """In the order of numbers, if all are numbers, else of the alphabet."""
    index: Int64[np.ndarray, " N"]
    """The number of each image's class."""
    notes: tuple[str, ...] = ()


def classes_of(labels: Sequence[str], where: str) -> Classes:
    """Number the classes of images by their names; an error begins with `where`."""
    found = set(labels)
    if not 2 <= len(found) <= MAX_CLASSES:
        raise MemtrainError(
            f"{where}: {len(found):,} classes of {len(labels):,} images; must be 2..{MAX_CLASSES:,}"
        )
    numbers = all(name.isdecimal() for name in found)
    names = sorted(found, key=lambda name: (int(name) if numbers else 0, name))
    number = {name: i for i, name in enumerate(names)}
    return Classes(tuple(names), np.array([number[label] for label in labels], np.int64))


def read_classes(path: Path, images: ImageSet, labels: bool | str) -> Classes | None:
    """The classes of images, if there are labels.

    Args:
        path: the folder, zip or .npy of the images.
        images: what was read of it.
        labels: True: of a .npy the labels beside it, else the name of the folder in `path` that
            an image is in. Or a file: a .npy of one label per image, or lines of FILE,CLASS.
    """
    if not labels:
        return None
    file = label_file(path, labels)
    if file is None:
        return _of_folders(path, images.names)
    if not path.is_dir() and path.suffix == ".npy":
        return _of_array(file, len(images.names))
    return _of_lines(file, images.names)


def label_file(path: Path, labels: bool | str) -> Path | None:
    """The file that the labels of `path` are in; None if they are the names of folders."""
    if isinstance(labels, str):
        named = Path(labels).expanduser()
        folder = path if path.is_dir() else path.parent
        found = next((one for one in (named, folder / named) if one.is_file()), None)
        if found is None:
            raise MemtrainError(
                f"labels={labels}: no such file; true takes the names of folders, or the .npy "
                "beside an array"
            )
        return found
    if not labels or path.is_dir() or path.suffix != ".npy":
        return None
    names = [f"{path.stem}{end}" for end in (".labels.npy", "-labels.npy", "_labels.npy")]
    beside = [path.with_name(name) for name in (*names, "labels.npy")]
    found = next((file for file in beside if file.is_file()), None)
    if found is None:
        raise MemtrainError(
            f"labels=true: there is no {names[1]} beside {path}; save it there, or name the file: "
            "--option labels FILE.npy"
        )
    return found


def _of_folders(path: Path, names: Sequence[str]) -> Classes:
    parts = [PurePosixPath(name).parts[:-1] for name in names]
    shared = 0  # a zip often has one folder with everything else in it
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    loose = [name for name, part in zip(names, parts, strict=True) if len(part) <= shared]
    if loose:
        raise MemtrainError(
            f"labels=true: {len(loose):,} of {len(names):,} images are in no folder of a class "
            f"({name_some(loose[:2])}); put each class into a folder of {path}, or name a file "
            f"with {_LINES}"
        )
    return classes_of([part[shared] for part in parts], f"labels=true: {path}")


def _of_array(file: Path, count: int) -> Classes:
    try:
        array = open_array(file)
    except (OSError, ValueError) as error:
        raise MemtrainError(f"labels={file}: {str(error).splitlines()[0]}") from None
    if array.dtype.kind not in "iubU" or array.shape != (count,):
        raise MemtrainError(
            f"labels={file}: {array.dtype} of shape {array.shape}: must be whole numbers or "
            f"strings of shape ({count},), one for each image"
        )
    return classes_of([str(label) for label in array.tolist()], f"labels={file}")


def _of_lines(file: Path, names: Sequence[str]) -> Classes:
    where = f"labels={file}"
    try:
        text = read_text(file, MAX_LABEL_BYTES).removeprefix("\ufeff")  # of a spreadsheet
        rows = [row for row in csv.reader(text.splitlines(), delimiter=_delimiter(text)) if row]
    except OSError as error:
        raise MemtrainError(f"{where}: {error.strerror or error}") from None
    except csv.Error as error:
        raise MemtrainError(f"{where}: not a table ({error}); must be {_LINES}") from None
    if rows and not is_image_name(rows[0][0].strip()):  # the names of the columns
        rows = rows[1:]
    short = [row for row in rows if len(row) < 2 or not row[1].strip()]
    if short or not rows:
        shown = f" ({one_line(short[0][0])[:40]!r} has no class)" if short else ""
        raise MemtrainError(f"{where}: must be {_LINES}{shown}")
    full = {name: name for name in names}
    unique: dict[str, str] = {}
    for name in names:  # a line may have the bare name of a file, if there is one of that name
        short_name = PurePosixPath(name).name
        unique[short_name] = "" if short_name in unique else name
    found: dict[str, str] = {}
    unknown = 0
    for given, label, *_ in rows:
        name = full.get(given.strip()) or unique.get(given.strip(), "")
        if not name:
            unknown += 1
        elif found.setdefault(name, label.strip()) != label.strip():
            raise MemtrainError(
                f"{where}: {one_line(name)} is {one_line(found[name])!r} and "
                f"{one_line(label.strip())!r}; an image has one class"
            )
    missing = [name for name in names if name not in found]
    if missing:
        raise MemtrainError(
            f"{where}: {len(missing):,} of {len(names):,} images have no class "
            f"({name_some(missing[:2])}); add lines of FILE,CLASS, or move them away"
        )
    notes = (f"{unknown:,} lines of {file.name} name no image that was read",) * (unknown > 0)
    classes = classes_of([found[name] for name in names], where)
    return Classes(classes.names, classes.index, notes)


def _delimiter(text: str) -> str:
    first = text.partition("\n")[0]
    return next((mark for mark in "\t;" if mark in first and "," not in first), ",")
