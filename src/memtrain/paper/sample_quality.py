"""How near generated images are to real ones: the Fréchet distance in a classifier's features.

The classifier is a small convolutional network trained on the data set's own images and labels.
Two references put a distance in proportion: held-out images (the floor), and images drawn by a
model that knows only the neighbours of each token (the ceiling), which have the data's texture and
none of its long-range structure. All three are sets of equally many images, compared with the
training images.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer, UInt8
from torch import Tensor, nn

from memtrain.data.images import decode_images
from memtrain.paper.plots import image_stream

if TYPE_CHECKING:
    from memtrain.training.run import Run

FEATURES = 32
"""Width of the layer in which images are compared."""
SAMPLES = 1000
"""Images per set, fewer if there are fewer held-out ones: a distance depends on their number."""
KNOWN = 10_000
"""Training images that the sets are compared with."""
CONFIDENT = 0.9
"""A classifier reads an image if it gives one class at least this probability."""


# ----------------------------------------------------------------------------------- classifier


class ImageClassifier(nn.Module):
    """Convolutions that halve the image to at most 4x4, then a layer of features, then classes.

    Images larger than 32x32 are averaged over 2x2 pixels first: strokes of one pixel in a white
    image of 64x64 train slowly.
    """

    def __init__(self, height: int, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm2d(1, affine=False)]
        if max(height, width) > 32:
            layers.append(nn.AvgPool2d(2))
            height, width = height // 2, width // 2
        channels = 1
        while max(height, width) > 4:
            wider = min(64, 32 * channels)
            layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1)]
            layers += [nn.BatchNorm2d(wider), nn.GELU()]
            channels, height, width = wider, -(-height // 2), -(-width // 2)
        layers += [nn.Flatten(), nn.Linear(channels * height * width, FEATURES)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(FEATURES, classes)

    def features(self, images: Float[Tensor, "N H W"]) -> Float[Tensor, "N F"]:
        return self.layers(images[:, None])

    def forward(self, images: Float[Tensor, "N H W"]) -> Float[Tensor, "N C"]:
        return self.head(F.gelu(self.features(images)))

    @torch.no_grad()
    def read(
        self, gray: UInt8[np.ndarray, "N H W"]
    ) -> tuple[Float[np.ndarray, "N F"], Float[np.ndarray, "N C"]]:
        """The features of images, and the probabilities of their classes."""
        images = _pixels(gray, self.head.weight.device)
        features = torch.cat([self.features(part) for part in images.split(1024)])
        classes = self.head(F.gelu(features)).softmax(dim=-1)
        return features.double().cpu().numpy(), classes.cpu().numpy()


def _pixels(gray: UInt8[np.ndarray, "N H W"], device: torch.device) -> Float[Tensor, "N H W"]:
    return torch.from_numpy(gray).to(device).float() / 255


def train_classifier(
    gray: UInt8[np.ndarray, "N H W"],
    labels: Integer[np.ndarray, " N"],
    device: torch.device,
    *,
    batch_size: int = 128,
) -> ImageClassifier:
    """Train a classifier, always in the same way: 20 epochs, at most 1,000 steps.

    Images are shifted at random by up to a fourteenth of their side.
    """
    count, height, width = gray.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ImageClassifier(height, width, int(labels.max()) + 1).to(device)
    images, classes = _pixels(gray, device), torch.from_numpy(labels.astype(np.int64)).to(device)
    steps = min(1000, 20 * math.ceil(count / batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, reach = torch.Generator().manual_seed(0), width // 14
    for _ in range(steps):
        chosen = torch.randint(count, (batch_size,), generator=generator).to(device)
        shift = torch.randint(-reach, reach + 1, (2,), generator=generator).tolist()
        batch = images[chosen].roll(shift, dims=(1, 2))
        loss = F.cross_entropy(model(batch), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


# ------------------------------------------------------------------------------------- distance


def frechet_distance(one: Float[np.ndarray, "N F"], other: Float[np.ndarray, "K F"]) -> float:
    """The Fréchet distance of two sets of features, each taken as a Gaussian.

    The root of |mu_1 - mu_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2)), so that it is in the units of
    the features: doubling all differences doubles it.
    """
    means = one.mean(axis=0) - other.mean(axis=0)
    first, second = (np.cov(each, rowvar=False) for each in (one, other))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    shared = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    squared = means @ means + np.trace(first) + np.trace(second) - 2 * shared
    return math.sqrt(max(0.0, float(squared)))


# -------------------------------------------------------------------------------------- ceiling


def local_samples(
    known: Integer[np.ndarray, "N R C"], count: int, vocab_size: int, seed: int = 0
) -> Integer[np.ndarray, "K R C"]:
    """Draw images token by token, each from the tokens of `known` with the same neighbours.

    The neighbours are the tokens to the left, above, above right and above left; beyond 16 values
    they are reduced to four. Where nothing in `known` has all of them, the nearest ones decide.

    Args:
        known: images as rows and columns of tokens.
        count: images to draw.
        vocab_size: of the tokens.
        seed: of the draws.
    """
    random = np.random.default_rng(seed)
    levels = vocab_size if vocab_size <= 16 else 4
    contexts = _contexts(_framed(known.astype(np.int64) * levels // vocab_size), levels)
    order = [context.argsort(axis=None) for context in contexts]
    tables = [(context.ravel()[by], by) for context, by in zip(contexts, order, strict=True)]
    rows, columns = known.shape[1:]
    drawn = np.zeros((count, rows, columns), known.dtype)
    frame = _framed(np.full(drawn.shape, -1))
    for row, column in np.ndindex(rows, columns):
        around = _contexts(frame[:, row : row + 2, column : column + 3], levels)
        place, found = np.zeros(count, np.int64), np.zeros(count, bool)
        for wanted, (context, by) in zip(around, tables, strict=True):
            low = np.searchsorted(context, wanted[:, 0, 0])
            high = np.searchsorted(context, wanted[:, 0, 0], "right")
            chosen = low + (random.random(count) * (high - low)).astype(np.int64)
            place = np.where(found, place, by[chosen.clip(max=len(by) - 1)])
            found |= high > low
        drawn[:, row, column] = known.reshape(-1)[place]
        reduced = drawn[:, row, column].astype(np.int64) * levels // vocab_size
        frame[:, row + 1, column + 1] = reduced + 1
    return drawn


def _framed(tokens: Int[np.ndarray, "N R C"]) -> Int[np.ndarray, "N rows columns"]:
    """Tokens from 1 on, with zeros above, to the left and to the right."""
    return np.pad(tokens + 1, ((0, 0), (1, 0), (1, 1)))


def _contexts(
    frame: Int[np.ndarray, "N rows columns"], levels: int
) -> list[Int[np.ndarray, "N R C"]]:
    """Numbers for the neighbours of every token: of all four, of two, of one, of none."""
    left, above = frame[:, 1:, :-2], frame[:, :-1, 1:-1]
    right, corner = frame[:, :-1, 2:], frame[:, :-1, :-2]
    base = levels + 1
    two = left * base + above
    return [(two * base + right) * base + corner, two, left, np.zeros_like(left)]


# ------------------------------------------------------------------------------------- measures


def sample_quality(run: "Run", samples: Integer[np.ndarray, "N L"]) -> dict[str, float]:
    """Fréchet distances and the share of readable images: samples, held-out images, the ceiling.

    Raises:
        MemtrainError: the data was prepared without labels.
    """
    task, picture = image_stream(run)
    sides = (picture.height // picture.patch, picture.width // picture.patch)
    tokens, labels = {}, {}
    for split in ("train", "test"):
        tokens[split] = task.tokens(split).cpu().numpy().reshape(-1, picture.length)
        labels[split] = task.store.labels(split)
    train, test = (decode_images(tokens[split], picture) for split in ("train", "test"))
    model = train_classifier(train, labels["train"], run.engine.device)
    sets = {
        "": samples,
        "floor_": _spread(tokens["test"], len(samples)),
        "ceiling_": local_samples(
            _spread(tokens["train"], 2000).reshape(-1, *sides), len(samples), picture.vocab_size
        ).reshape(-1, picture.length),
    }
    known, _ = model.read(_spread(train, KNOWN))
    found = {}
    for name, rows in sets.items():
        features, classes = model.read(decode_images(rows, picture))
        found[f"{name}distance"] = frechet_distance(features, known)
        found[f"{name}readable"] = float((classes.max(axis=1) > CONFIDENT).mean())
    right = model.read(test)[1].argmax(axis=1) == labels["test"]
    return found | {"classifier_accuracy": float(right.mean())}


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
