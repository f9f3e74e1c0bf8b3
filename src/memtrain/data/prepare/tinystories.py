"""TinyStories, from text or parquet."""

from pathlib import Path

from memtrain.data.prepare import download
from memtrain.data.prepare.encoding import encode_named, non_ascii_note
from memtrain.data.prepare.finding import check_folder, first_there
from memtrain.data.prepare.text_files import read_texts
from memtrain.data.store import Split, Store, StoreMeta, check_place, write_store
from memtrain.data.text import SEPARATOR_TOKEN, TEXT_VOCAB
from memtrain.errors import MemtrainError


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
        texts = read_texts(paths, any_bytes=True)
        encoded = encode_named(texts, "ascii", separator, ", ".join(map(str, paths)))
        splits[split] = Split(encoded.tokens, encoded.starts)
        notes += non_ascii_note(encoded, f"{split}: ")
    meta = StoreMeta(
        name="tinystories",
        vocab_size=TEXT_VOCAB,
        source=f"TinyStories (Eldan and Li 2023), from {data_dir or download.TINYSTORIES_REPO}",
        text=True,
        separator=SEPARATOR_TOKEN if separator else None,
        notes=tuple(notes),
    )
    return write_store(out, meta, splits, overwrite=overwrite)


def _tinystories_files(data_dir: Path | None) -> list[list[Path]]:
    """The files of train and of test."""
    if data_dir is None:
        return [[path] for path in download.download_tinystories()]
    check_folder("tinystories", data_dir)
    found, missing = [], []
    for split in ("train", "valid"):
        stems = (f"{split}.txt", f"TinyStories-{split}.txt")
        text = first_there(data_dir, *(stem + end for stem in stems for end in ("", ".gz")))
        tables = sorted(data_dir.glob(f"{split}*.parquet"))
        tables = tables or sorted(data_dir.glob(f"data/{split}*.parquet"))
        found.append([text] if text else tables)
        if not found[-1]:
            missing.append(f"{split}.txt, {split}.txt.gz or {split}*.parquet")
    if missing:
        raise MemtrainError(f"tinystories: {data_dir} has no {' and no '.join(missing)}")
    return found
