"""Encode texts as tokens, and split texts and images into train and test."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int64, Integer

from memtrain.data.codec import SEPARATOR_TOKEN, EncodedText, encode_text
from memtrain.data.prepare.text_files import Texts
from memtrain.data.store import Split
from memtrain.errors import MemtrainError

# ----------------------------------------------------------------------------------------- text


def encode_texts(
    texts: Texts, mode: str, separator: bool, where: str, divider: str = ""
) -> EncodedText:
    """Encode texts as tokens; an error begins with `where`."""
    try:
        return encode_text(texts.raw, mode, separator=separator, divider=divider)
    except MemtrainError as error:
        raise MemtrainError(f"{where}: {error}") from None


def non_ascii_note(encoded: EncodedText, prefix: str) -> tuple[str, ...]:
    """A note on non-ASCII characters that were kept or dropped, if any."""
    if encoded.kept_bytes:
        kept = f"kept {encoded.kept_bytes:,} bytes beyond ASCII"
        return (f"{prefix}{kept}; --option mode ascii drops them",)
    if not encoded.dropped_bytes:
        return ()
    characters, count = encoded.dropped_characters, encoded.dropped_bytes
    return (f"{prefix}dropped {characters:,} non-ASCII characters ({count:,} bytes)",)


def split_stream(
    tokens: Integer[np.ndarray, " N"],
    starts: Int64[np.ndarray, " K"],
    share: float,
    *,
    whole_characters: bool = False,
) -> dict[str, Split]:
    """Hold out the last documents, or the end of a single one.

    With `whole_characters`, tokens are the bytes of UTF-8, and none of its characters is cut.
    """
    if len(starts) < 2:
        cut = len(tokens) - round(share * len(tokens))
        while whole_characters and 0 < cut < len(tokens) and 128 <= tokens[cut] < 192:
            cut += 1
        start = np.zeros(1, np.int64)
        return {"train": Split(tokens[:cut], start), "test": Split(tokens[cut:], start)}
    first = len(starts) - held_out_count(len(starts), share, "documents")
    cut = int(starts[first])
    return {
        "train": Split(tokens[:cut], starts[:first]),
        "test": Split(tokens[cut:], starts[first:] - cut),
    }


def join_splits(parts: Sequence[Mapping[str, Split]], separator: int | None) -> dict[str, Split]:
    """Join the splits of several texts, each with its own held-out part.

    Args:
        parts: train and test of each text, as bytes.
        separator: the token between documents, if there is one.
    """
    return {name: _joined([part[name] for part in parts], separator) for name in parts[0]}


def _joined(splits: list[Split], separator: int | None) -> Split:
    tokens: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    length = 0
    for number, split in enumerate(splits):
        if number and separator is not None and tokens[-1][-1] != separator:
            tokens.append(np.array([separator], split.tokens.dtype))
            length += 1
        assert split.starts is not None
        tokens.append(split.tokens)
        starts.append(split.starts + length)
        length += len(split.tokens)
    whole = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
    marks = 0 if separator is None else int(np.count_nonzero(whole == separator))
    return Split(whole, np.concatenate(starts), text_bytes=len(whole) - marks)


def repeated_note(splits: Mapping[str, Split]) -> tuple[str, ...]:
    """A note on held-out documents of bytes that are in the training part too, if there are any."""
    held = Counter(_digests(splits["test"]))
    shared = {one for one in _digests(splits["train"]) if one in held}
    count, total = sum(held[one] for one in shared), held.total()
    if not count:
        return ()
    return (
        f"held-out documents that are in the training part too: {count:,} of {total:,}; keep one "
        "of each, they flatter the held-out loss",
    )


def _digests(split: Split) -> Iterator[bytes]:
    """A checksum of each document, without the line end and the separator that may follow it."""
    assert split.starts is not None
    ends = [*split.starts[1:].tolist(), len(split.tokens)]
    for begin, end in zip(split.starts.tolist(), ends, strict=True):
        while end > begin and split.tokens[end - 1] in (SEPARATOR_TOKEN, *b"\r\n"):
            end -= 1
        yield hashlib.blake2b(split.tokens[begin:end].data, digest_size=16).digest()


# ------------------------------------------------------------------------------------- held out


def check_share(held_out: float) -> None:
    """Refuse to hold out nothing or everything."""
    if not 0 < held_out < 1:
        raise MemtrainError(f"held_out={held_out}: must be above 0 and below 1; 0.1 is usual")


def held_out_count(total: int, share: float, what: str) -> int:
    """The number of held-out items: at least one, and never all."""
    if total < 2:
        raise MemtrainError(f"{what}: {total}, at least 2 are needed to hold one out")
    return min(total - 1, max(1, round(share * total)))


def groups_of(keys: Sequence[str], digests: Sequence[bytes]) -> list[str]:
    """The group of each image, named by its first key in the alphabet.

    Images with the same key or the same digest are in one group, and so are those that are
    connected by others.
    """
    group = {key: key for key in keys}

    def find(key: str) -> str:
        while group[key] != key:
            group[key] = group[group[key]]  # halves the way for the next time
            key = group[key]
        return key

    first: dict[bytes, str] = {}
    for key, digest in zip(keys, digests, strict=True):
        one, other = find(key), find(first.setdefault(digest, key))
        group[max(one, other)] = min(one, other)
    return [find(key) for key in keys]


def equal_note(digests: Sequence[bytes]) -> tuple[str, ...]:
    """A note on images that are equal, if there are any."""
    repeated = len(digests) - len(set(digests))
    if not repeated:
        return ()
    images = "1 image repeats" if repeated == 1 else f"{repeated:,} images repeat"
    return (f"{images} the pixels of another; equal images are all in train or all in test",)


def held_out_names(names: Iterable[str], share: float) -> set[str]:
    """Choose names to hold out by a hash of each, so that adding others moves none.

    If a side would be empty, the name nearest to the boundary changes sides.
    """
    rank = {name: _rank(name) for name in names}
    held_out_count(len(rank), share, "different images")
    held = {name for name, place in rank.items() if place < share}
    if not held:
        return {min(rank, key=rank.__getitem__)}
    if len(held) == len(rank):
        held.remove(max(rank, key=rank.__getitem__))
    return held


def _rank(name: str) -> float:
    """A hash of a name, in 0..1; file names need not be UTF-8."""
    raw = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8]) / 2**64
