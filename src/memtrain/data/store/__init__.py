"""Prepared data: token streams on disk, written once and memory-mapped afterwards.

A store is a folder with

- `train.bin` and `test.bin`: tokens as little-endian uint8 or uint16 and nothing else;
- `train.starts.npy` and `test.starts.npy`: where each document starts, as int64; absent when
  every document has the same length;
- `meta.json`: what the tokens are, how many, and a sha256 of each `.bin`.

It is written beside its place, synced to disk and renamed, so a reader never meets half of one.
"""

from memtrain.data.store.format import (
    LoadedSplit,
    Split,
    SplitInfo,
    Store,
    StoreMeta,
    identity_of,
    open_array,
    require_tokens,
)
from memtrain.data.store.opening import load_splits, load_store, open_store
from memtrain.data.store.writing import alone, check_place, publish, write_store

__all__ = [
    "LoadedSplit",
    "Split",
    "SplitInfo",
    "Store",
    "StoreMeta",
    "alone",
    "check_place",
    "identity_of",
    "load_splits",
    "load_store",
    "open_array",
    "open_store",
    "publish",
    "require_tokens",
    "write_store",
]
