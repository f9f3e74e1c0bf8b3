"""Memories while an image is read: digits, sketches, and a cat drawn as a polygon.

A memory becomes a colour: its first three principal components, or its place in a t-SNE of three
dimensions, are red, green and blue. The colours are shown where the token was read, and along the
flat sequence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from memtrain.data.images import encode_images
from memtrain.generation.sampling import sample
from memtrain.losses import decode_loss
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import natural
from memtrain.paper.plots import (
    album,
    grey,
    image_format,
    image_stream,
    real_images,
    show_image,
    where,
)
from memtrain.paper.toy_data import draw_cat
from memtrain.plotting.style import STYLE
from memtrain.training.run import Run

IMAGES = 2
"""Images of each data set that are shown; their memories are projected together."""
GIVEN = (0.25, 0.5, 0.75)
"""Fractions of the cat that are read before the RNN continues on its own."""
CONTINUATIONS = 4
POINTS = 2048
"""Memories in one t-SNE; of more, every second (third, ...) is placed, and colours the next."""
PROJECTIONS = {"pca": "PCA", "tsne": "t-SNE"}


class MemoryEvolution(Experiment):
    name = "memory-evolution"
    version = 2
    claim = (
        "While an image is read, memories move along structured paths; the RNN reads an unseen cat "
        "as a drawing, and continues it."
    )
    data_sets = ("mnist", "sketchy")

    def grid(self, setup: Setup) -> list[Job]:
        """Runs of the figures `mnist-samples` and `sketchy-samples`."""
        return jobs_over(lambda data: natural(setup, data), data=self.data_sets)

    def measure(self, run: Run) -> dict:
        images = real_images(run, "test", 8)
        paths = memories_of(run, images)  # (N, L, M·D)
        found = {
            "album": album(run, images=images[:IMAGES]),
            "smoothness": smoothness(paths),
            "explained": principal(paths.reshape(-1, paths.shape[-1]), 3)[1],
            "maps": project(paths[:IMAGES]),
        }
        return found | (read_cat(run) if run.config.name == "sketchy" else {})

    def judge(self, setup: Setup, results: Sequence[Result]) -> Verdict:
        (digits,), (sketches,) = (where(results, data=data) for data in self.data_sets)
        smooth = max(digits["smoothness"], sketches["smoothness"])
        nats, scattered = sketches["cat_nats"], sketches["scattered_nats"]
        return Verdict(
            holds=smooth < 0.7 and nats < scattered,
            sentence=f"A step is {digits['smoothness']:.2f} (digits) and "
            f"{sketches['smoothness']:.2f} (sketches) times as long as the distance of two "
            f"memories of an image; three directions explain {digits['explained']:.0%} and "
            f"{sketches['explained']:.0%} of the variance. The cat takes {nats:.2f} nats per "
            f"patch, its patches in random order {scattered:.2f}.",
            numbers={
                "smoothness": [digits["smoothness"], sketches["smoothness"]],
                "explained": [digits["explained"], sketches["explained"]],
                "cat_nats": nats,
                "scattered_nats": scattered,
            },
        )

    def plot(self, setup: Setup, results: Sequence[Result]):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        (digits,), (sketches,) = (where(results, data=data) for data in self.data_sets)
        shown = [("digit", digits["album"], digits["maps"], index) for index in range(IMAGES)]
        shown += [("sketch", sketches["album"], sketches["maps"], index) for index in range(IMAGES)]
        shown += [("the cat", sketches["cat"], sketches["cat_maps"], 0)]
        with rc_context(STYLE):
            figure = Figure(figsize=(10, 16.5))
            parts: Any = figure.subfigures(3, 1, height_ratios=(10, 2.6, 3.6))
            above, middle, below = parts
            above.suptitle("Memories of the RNN while it reads an image", fontsize=11)
            rows = above.subplots(len(shown), 5)
            for places, image in zip(rows, shown, strict=True):
                _draw_maps(places, *image)
            _name_columns(rows[0])
            middle.suptitle("The same along the flat sequence", fontsize=11)
            _draw_strips(middle.subplots(9, 1), [shown[0], shown[IMAGES], shown[-1]])
            below.suptitle("The cat, continued by the RNN from the line on", fontsize=11)
            _draw_continuations(below, sketches["cat"])
        return figure


# ---------------------------------------------------------------------------------- projections


@torch.no_grad()
def memories_of(run: Run, tokens: np.ndarray) -> Float[np.ndarray, "N L F"]:
    """The RNN's memories after each token, flattened to F = M·D numbers."""
    inputs = torch.from_numpy(tokens.astype(np.int64)).to(run.engine.device)
    return run.rnn.eval().unroll(inputs).flatten(2).float().cpu().numpy()


def principal(
    points: Float[np.ndarray, "N F"], components: int
) -> tuple[Float[np.ndarray, "N C"], float]:
    """The first principal components, and their share of the variance."""
    centred = torch.from_numpy(points - points.mean(axis=0)).double()
    with torch.random.fork_rng(devices=[]):  # the algorithm is randomised
        torch.manual_seed(0)
        most = min(components + 8, *centred.shape)
        _, _, directions = torch.pca_lowrank(centred, most, center=False, niter=4)
    directions = directions[:, :components]
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    placed = centred @ (directions * largest.sign())  # a direction's sign is arbitrary
    share = placed.square().sum() / centred.square().sum().clamp(min=1e-12)
    return placed.numpy(), float(share)


def tsne(points: Float[np.ndarray, "N F"], components: int) -> Float[np.ndarray, "N C"]:
    """t-SNE of the first 50 principal components, with fixed parameters and seed."""
    from sklearn.manifold import TSNE

    reduced, _ = principal(points, min(50, *points.shape))
    perplexity = min(30.0, (len(points) - 1) / 3)
    placed = TSNE(components, perplexity=perplexity, init="pca", random_state=0)
    return placed.fit_transform(reduced).astype(np.float64)


def project(paths: Float[np.ndarray, "N L F"]) -> dict[str, list]:
    """Memories of some images as colours (N, L, 3) and in the plane (N, L, 2), as JSON."""
    count, length, width = paths.shape
    stride = -(-count * length // POINTS)
    points = paths[:, ::stride].reshape(-1, width)
    found = {}
    for name in PROJECTIONS:
        placed = {
            size: (principal(points, size)[0] if name == "pca" else tsne(points, size))
            for size in (2, 3)
        }
        rgb = colours(placed[3]).reshape(count, -1, 3).repeat(stride, axis=1)[:, :length]
        found[f"{name}_rgb"] = rgb.tolist()
        found[f"{name}_path"] = placed[2].reshape(count, -1, 2).round(2).tolist()
    return found


def colours(points: Float[np.ndarray, "N 3"]) -> UInt8[np.ndarray, "N 3"]:
    """Each dimension from its 1st to its 99th percentile as 0 to 255."""
    low, high = np.percentile(points, (1, 99), axis=0)
    return np.rint(255 * ((points - low) / (high - low).clip(min=1e-12)).clip(0, 1)).astype(
        np.uint8
    )


def smoothness(paths: Float[np.ndarray, "N L F"]) -> float:
    """Mean length of a step relative to the mean distance of two memories of the same image."""
    steps = np.linalg.norm(np.diff(paths, axis=1), axis=-1).mean()
    order = np.random.default_rng(0).permutation(paths.shape[1])
    apart = np.linalg.norm(paths - paths[:, order], axis=-1).mean()
    return float(steps / max(1e-12, apart))


# -------------------------------------------------------------------------------------- the cat


def read_cat(run: Run) -> dict:
    """Let the RNN read the cat, and continue it several times from several points."""
    _, picture = image_stream(run)
    tokens = encode_images(draw_cat(picture.height)[None], levels=2, patch=picture.patch)
    mixed = np.random.default_rng(0).permuted(tokens, axis=1)
    written = []
    for share in GIVEN:
        given = tokens[:, : int(share * picture.length)].repeat(CONTINUATIONS, axis=0)
        prompt = torch.from_numpy(given.astype(np.int64)).to(run.engine.device)
        left = picture.length - given.shape[1]
        rest = sample(run.rnn.eval(), prompt, left, torch.Generator().manual_seed(0))
        written.append(np.concatenate([given, rest.cpu().numpy()], axis=1))
    return {
        "cat": album(run, images=tokens, written=np.concatenate(written)),
        "cat_maps": project(memories_of(run, tokens)),
        "cat_nats": _nats(run, tokens),
        "scattered_nats": _nats(run, mixed),
    }


def _nats(run: Run, tokens: np.ndarray) -> float:
    row = torch.from_numpy(tokens.astype(np.int64)).to(run.engine.device)
    logits, _ = run.rnn.eval().read(row[:, :-1])
    return float(decode_loss(logits, row[:, 1:]))


# -------------------------------------------------------------------------------------- drawing


def _draw_maps(places, label: str, pictures: dict, maps: dict, index: int) -> None:
    """One image, then colours over the image and the path in the plane, by PCA and t-SNE."""
    shape = _rows_and_columns(pictures)
    show_image(places[0], grey(pictures, "images")[index], label)
    for number, name in enumerate(PROJECTIONS):
        over, path = places[1 + 2 * number : 3 + 2 * number]
        over.imshow(np.array(maps[f"{name}_rgb"][index], np.uint8).reshape(*shape, 3))
        over.set_axis_off()
        x, y = np.array(maps[f"{name}_path"][index]).T
        path.plot(x, y, color="#d9dcdf", lw=0.5)
        path.scatter(x, y, c=np.arange(len(x)), cmap="viridis", s=4, linewidths=0, zorder=3)
        path.set(xticks=[], yticks=[])


def _name_columns(places) -> None:
    for number, kind in enumerate(PROJECTIONS.values()):
        over, path = places[1 + 2 * number : 3 + 2 * number]
        over.set_title(f"{kind}, three dimensions\nas red, green, blue", fontsize=9)
        path.set_title(f"{kind}, two dimensions\n(first step dark, last yellow)", fontsize=9)


def _draw_strips(places, shown: Sequence[tuple[str, dict, dict, int]]) -> None:
    """Tokens, PCA colours and t-SNE colours of each image as strips."""
    strips = iter(places)
    for label, pictures, maps, index in shown:
        tokens, picture = np.array(pictures["images"][index]), image_format(pictures)
        place = next(strips)
        shades = "gray" if picture.levels > 2 else "gray_r"  # of two levels, 1 is ink
        place.imshow(tokens[None], cmap=shades, aspect="auto", interpolation="nearest")
        rows = [(place, f"{label}: tokens")]
        for name, kind in PROJECTIONS.items():
            place = next(strips)
            rgb = np.array(maps[f"{name}_rgb"][index], np.uint8)
            place.imshow(rgb[None], aspect="auto", interpolation="nearest")
            rows.append((place, kind))
        for place, text in rows:
            place.set(xticks=[], yticks=[])
            place.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8)
            place.spines[:].set(visible=True, color="#c4c9ce", linewidth=0.6)


def _draw_continuations(figure, pictures: dict) -> None:
    written = grey(pictures, "written")
    places = figure.subplots(2, len(written) // 2)
    for index, (place, image) in enumerate(zip(places.flat, written, strict=True)):
        share = GIVEN[index // CONTINUATIONS]
        show_image(place, image, f"after {share:.0%}")
        place.title.set_fontsize(8)
        place.axhline(share * image.shape[0] - 0.5, color="#d55e00", lw=1)


def _rows_and_columns(pictures: dict) -> tuple[int, int]:
    picture = image_format(pictures)
    return picture.height // picture.patch, picture.width // picture.patch


FIGURE = MemoryEvolution()
