"""Measure how many images that a model drew by class a classifier reads as that class.

    memtrain data mnist --data-dir FOLDER --out data/digits14 \\
        --option size 14 levels 4 patch 2 labels true
    memtrain train mnist --data data/digits14 --size small --folder runs/digits14
    python scripts/draw_by_class.py runs/digits14 --count 100 --out by-class.json

The classifier (memtrain.paper.sample_quality) is trained on the real training images of the run's
data; its accuracy on the real held-out images is printed beside the share, which cannot be
expected to be higher. Next to the JSON a PNG shows the first images of each class.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import memtrain
from memtrain.config import Stream
from memtrain.data.images import Pixels, decode_images
from memtrain.data.store import Store
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError
from memtrain.files import write_output
from memtrain.generation.generate import Samples
from memtrain.paper.sample_quality import ImageClassifier, train_classifier
from memtrain.plotting.figures import save_grid

SHOWN = 10
"""Images of each class in the PNG."""


def real_images(store: Store, split: str) -> tuple[Pixels, np.ndarray]:
    """The grey images of a split without their class tokens, and their classes."""
    assert store.meta.picture is not None and store.meta.document_length is not None
    tokens = store.tokens(split).reshape(-1, store.meta.document_length)[:, 1:]
    return grey(decode_images(tokens, store.meta.picture)), store.labels(split)


def grey(pixels: Pixels) -> Pixels:
    """The mean of the colours, if images have some: the classifier reads grey."""
    return pixels if pixels.ndim == 3 else np.rint(pixels.mean(axis=-1)).astype(np.uint8)


def shares(
    classifier: ImageClassifier, pixels: Pixels, labels: np.ndarray, classes: int
) -> tuple[float, list[float | None]]:
    """The share of images that are read as their class: of all, and by class."""
    right = classifier.read(pixels)[1].argmax(axis=1) == labels
    by_class = [right[labels == number] for number in range(classes)]
    return float(right.mean()), [float(one.mean()) if len(one) else None for one in by_class]


def measure(folder: Path, count: int, seed: int, options: dict) -> tuple[dict, Samples]:
    """Draw `count` images of each class of a run, and read them."""
    model = memtrain.load_rnn(folder)
    codec = model.spelling
    if codec is None or not codec.classes:
        raise MemtrainError(
            f"{folder}: has no classes; train it on images with --option labels true"
        )
    assert isinstance(model.config.data, Stream)
    store = open_store(Path(model.config.data.path))
    classifier = train_classifier(*real_images(store, "train"), torch.device("cpu"))
    drawn = memtrain.generate(model, label=codec.classes, count=count, seed=seed, **options)
    asked = np.arange(len(codec.classes)).repeat(count)
    share, by_class = shares(classifier, grey(drawn.pictures()), asked, len(codec.classes))
    accuracy, real = shares(classifier, *real_images(store, "test"), len(codec.classes))
    record = {
        "run": str(folder),
        "count": count,
        "seed": seed,
        **options,
        "share": share,
        "accuracy_on_held_out": accuracy,
        "guessing": 1 / len(codec.classes),
        "classes": list(codec.classes),
        "share_by_class": by_class,
        "accuracy_by_class": real,
        "stages": model.trained["stages"],
    }
    return record, drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of images with classes")
    parser.add_argument("--count", type=int, default=100, help="images of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("by-class.json"))
    chosen = parser.parse_args(arguments)
    options = {"temperature": chosen.temperature}
    record, drawn = measure(chosen.run, chosen.count, chosen.seed, options)
    write_output(chosen.out, f"{json.dumps(record, indent=1)}\n".encode())
    shown = drawn.pictures().reshape(-1, chosen.count, *drawn.pictures().shape[1:])[:, :SHOWN]
    columns = shown.shape[1]
    save_grid(chosen.out.with_suffix(".png"), shown.reshape(-1, *shown.shape[2:]), columns=columns)
    print(f"read as their class: {record['share']:.3f} of {len(drawn.tokens)} drawn images")
    print(f"the classifier on real held-out images: {record['accuracy_on_held_out']:.3f}")
    for name, share, real in zip(
        record["classes"], record["share_by_class"], record["accuracy_by_class"], strict=True
    ):
        held = "-" if real is None else f"{real:.3f}"
        print(f"  {name:<12} drawn {share:.3f}   real {held}")


if __name__ == "__main__":
    main()
