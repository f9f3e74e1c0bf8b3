"""Memories while an image is read: digits, sketches, and a cat drawn as a polygon."""

from collections.abc import Sequence

import numpy as np
import torch

from memtrain.data.images import encode_images
from memtrain.generation.sampling import sample
from memtrain.objectives.losses import decode_loss
from memtrain.paper.base import Experiment, Job, Result, Setup, Verdict, jobs_over
from memtrain.paper.configs import natural
from memtrain.paper.plots import (
    album,
    grey,
    image_stream,
    real_images,
    show_image,
    show_images,
    where,
)
from memtrain.paper.toy_data import draw_cat
from memtrain.plotting.style import panels
from memtrain.training.run import Run

GIVEN = (0.25, 0.5, 0.75)
"""Fractions of the cat that are read before the RNN continues on its own."""


class MemoryEvolution(Experiment):
    name = "memory-evolution"
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
            "album": album(run, images=images),
            "pca": principal(paths).round(3).tolist(),
            "explained": explained(paths),
            "smoothness": smoothness(paths),
            "tsne": tsne(paths[0]),
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
            f"memories of an image; two directions explain {digits['explained']:.0%} and "
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
        figure, axes = panels(3, 4, width=2.7, height=2.6)
        for row, (data, label) in enumerate((("mnist", "digits"), ("sketchy", "sketches"))):
            (result,) = where(results, data=data)
            pictures = grey(result["album"], "images")
            show_images(axes[row, 0], pictures[:4], f"{label}, held out", columns=2)
            paths = np.array(result["pca"])
            for path in paths[:4]:
                axes[row, 1].plot(*path.T, lw=0.8)
            axes[row, 1].set(xticks=[], yticks=[])
            axes[row, 1].set_title("PCA, four images", fontsize=9)
            _coloured_path(axes[row, 2], result["tsne"], "t-SNE of the first, t in colour")
            if data == "mnist":
                axes[row, 3].plot(paths[0], lw=0.9)
                axes[row, 3].set_title("both components along t", fontsize=9)
                axes[row, 3].set_xlabel("timestep t")
            else:
                _coloured_path(axes[row, 3], result["cat_tsne"], "t-SNE of the cat")
        cat = where(results, data="sketchy")[0]["cat"]
        shown = grey(cat, "read")[0]
        show_image(axes[2, 0], shown, "the cat")
        for place, share, written in zip(axes[2, 1:], GIVEN, grey(cat, "written"), strict=True):
            show_image(place, written, f"generated after {share:.0%}")
            place.axhline(share * shown.shape[0] - 0.5, color="#d55e00", lw=1)
        return figure


@torch.no_grad()
def memories_of(run: Run, tokens: np.ndarray) -> np.ndarray:
    """The RNN's memories after each token, (N, L, M·D)."""
    inputs = torch.from_numpy(tokens.astype(np.int64)).to(run.engine.device)
    return run.rnn.eval().unroll(inputs).flatten(2).float().cpu().numpy()


def _centred(paths: np.ndarray) -> torch.Tensor:
    flat = paths.reshape(-1, paths.shape[-1])
    return torch.from_numpy(flat - flat.mean(axis=0))


def principal(paths: np.ndarray) -> np.ndarray:
    """The first two principal components of all memories, (N, L, 2)."""
    flat = _centred(paths)
    _, _, directions = torch.linalg.svd(flat, full_matrices=False)
    return (flat @ directions[:2].T).numpy().reshape(*paths.shape[:2], 2)


def explained(paths: np.ndarray) -> float:
    """Share of the variance in the first two principal components."""
    variance = torch.linalg.svdvals(_centred(paths)).square()
    return float(variance[:2].sum() / variance.sum().clamp(min=1e-12))


def smoothness(paths: np.ndarray) -> float:
    """Mean length of a step relative to the mean distance of two memories of the same image."""
    steps = np.linalg.norm(np.diff(paths, axis=1), axis=-1).mean()
    order = np.random.default_rng(0).permutation(paths.shape[1])
    apart = np.linalg.norm(paths - paths[:, order], axis=-1).mean()
    return float(steps / max(1e-12, apart))


def tsne(path: np.ndarray) -> list:
    """t-SNE of the memories of one image, (L, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(path) - 1) / 3)
    placed = TSNE(2, perplexity=perplexity, init="pca", random_state=0)
    return placed.fit_transform(path).round(2).tolist()


def read_cat(run: Run) -> dict:
    """Let the RNN read the cat, and continue it from several points."""
    _, picture = image_stream(run)
    tokens = encode_images(draw_cat(picture.height)[None], levels=2, patch=picture.patch)
    mixed = np.random.default_rng(0).permuted(tokens, axis=1)
    written = []
    for share in GIVEN:
        given = int(share * picture.length)
        prompt = torch.from_numpy(tokens[:, :given].astype(np.int64)).to(run.engine.device)
        rest = sample(
            run.rnn.eval(), prompt, picture.length - given, torch.Generator().manual_seed(0)
        )
        written.append(np.concatenate([tokens[0, :given], rest[0].cpu().numpy()]))
    return {
        "cat": album(run, read=tokens, written=np.stack(written)),
        "cat_tsne": tsne(memories_of(run, tokens)[0]),
        "cat_nats": _nats(run, tokens),
        "scattered_nats": _nats(run, mixed),
    }


def _nats(run: Run, tokens: np.ndarray) -> float:
    row = torch.from_numpy(tokens.astype(np.int64)).to(run.engine.device)
    logits, _ = run.rnn.eval().read(row[:, :-1])
    return float(decode_loss(logits, row[:, 1:]))


def _coloured_path(place, points: list, title: str) -> None:
    x, y = np.array(points).T
    place.plot(x, y, color="#d9dcdf", lw=0.6)
    place.scatter(x, y, c=np.arange(len(points)), cmap="viridis", s=6, zorder=3)
    place.set(xticks=[], yticks=[])
    place.set_title(title, fontsize=9)


FIGURE = MemoryEvolution()
