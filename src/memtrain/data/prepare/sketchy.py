"""Sketchy, from its sketches as PNG files."""

import re
from pathlib import Path, PurePosixPath

from memtrain.data.augmentation import Augmentation
from memtrain.data.prepare.encoding import copies_note, image_codec, skipped_note
from memtrain.data.prepare.finding import check_folder, first_there
from memtrain.data.prepare.image_files import read_folder
from memtrain.data.prepare.split import check_share, held_out_names
from memtrain.data.store import Store, StoreMeta, check_place, write_store
from memtrain.errors import MemtrainError

SKETCHY_NAME = re.compile(r"(?P<photo>.+)-\d+\.png")


def prepare_sketchy(
    data_dir: Path | None,
    out: Path,
    *,
    threshold: int = 192,
    held_out: float = 0.1,
    mirror: bool = False,
    shift: int = 0,
    overwrite: bool = False,
) -> Store:
    """Sketchy's sketches at 64x64 (Lanczos), binarised, as 1,024 tokens of 2x2 pixels.

    All sketches of one photo are alike, so a photo is in train or in test with all of them.

    Args:
        data_dir: a zip or folder of `<class>/<photo>-<number>.png`, or a folder with one.
        out: the store's folder.
        threshold: darker is ink. Resizing leaves thin strokes grey: at 128 they break into dashes.
        held_out: share of the photos in test; a photo's side follows from its name.
        mirror: learn from mirrored sketches too.
        shift: learn from sketches moved by so many pixels too, in eight directions.
        overwrite: replace a store that is there.
    """
    check_place(out, overwrite)
    check_share(held_out)
    copies = Augmentation(mirror=mirror, shift=shift)
    if data_dir is None:
        raise MemtrainError(
            "sketchy: has no direct download; get the sketches (256x256 PNG) from "
            "https://sketchy.eye.gatech.edu and pass --data-dir FOLDER"
        )
    path = _sketchy_files(data_dir)
    pictures = read_folder(
        path,
        (64, 64),
        accept=lambda name: _photo(name) is not None,
        wanted="sketches are wanted, PNG or JPEG files named PHOTO-NUMBER, as n02691156_58-1.png",
    )
    photos = [_photo(name) or "" for name in pictures.names]
    held = held_out_names(photos, held_out)
    picture, splits = image_codec(
        pictures,
        [photo in held for photo in photos],
        levels=2,
        patch=2,
        threshold=threshold,
        copies=copies,
    )
    meta = StoreMeta(
        name="sketchy",
        vocab_size=picture.vocab_size,
        source=f"Sketchy (Sangkloy et al. 2016), from {path}",
        document_length=picture.length,
        picture=picture,
        notes=(
            *skipped_note(pictures),
            f"ink: grey below {threshold}",
            f"split by photo: {len(set(photos)) - len(held):,} in train, {len(held):,} in test",
            *copies_note(copies),
        ),
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def _sketchy_files(data_dir: Path) -> Path:
    """The zip or folder of sketches."""
    check_folder("sketchy", data_dir)
    if data_dir.is_file():
        return data_dir
    # The database's own zip holds each sketch several times, moved and scaled: take the plain one.
    plain = ("256x256/sketch/tx_000000000000", "sketch/tx_000000000000", "sketch")
    known = first_there(data_dir, "sketchy_256x256_png.zip", *plain)
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
