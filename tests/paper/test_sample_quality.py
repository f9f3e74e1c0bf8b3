"""The yardstick of generated images: the distance, the classifier and the ceiling."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from memtrain.paper.sample_quality import frechet_distance, local_samples, train_classifier


def gaussian(mean: np.ndarray, root: np.ndarray, count: int = 400) -> np.ndarray:
    """Points whose mean and covariance (root @ root.T) are exact, not only expected."""
    points = np.random.default_rng(0).standard_normal((count, len(mean)))
    points -= points.mean(axis=0)
    points = points @ np.linalg.inv(np.linalg.cholesky(np.cov(points, rowvar=False))).T
    return mean + points @ root.T


def test_distance_of_gaussians_that_differ_in_place_and_size():
    # Covariances that commute: |mu|^2 + sum over directions of (deviation - deviation)^2.
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    one = gaussian(np.zeros(3), turn @ np.diag([1.0, 2.0, 3.0]))
    other = gaussian(np.array([3.0, 0.0, 4.0]), turn @ np.diag([2.0, 2.0, 1.0]))
    assert frechet_distance(one, other) == pytest.approx(np.sqrt(25 + 1 + 0 + 4))
    assert frechet_distance(other, one) == pytest.approx(frechet_distance(one, other))


def test_distance_of_gaussians_whose_covariances_do_not_commute():
    from scipy.linalg import sqrtm

    roots = np.random.default_rng(2).standard_normal((2, 4, 4))
    one, other = (gaussian(np.zeros(4), root) for root in roots)
    first, second = (root @ root.T for root in roots)
    shared = np.trace(np.real(sqrtm(first @ second)))
    expected = np.sqrt(np.trace(first) + np.trace(second) - 2 * shared)
    assert frechet_distance(one, other) == pytest.approx(expected)


def test_equal_sets_have_no_distance_and_order_does_not_matter():
    points = np.random.default_rng(0).standard_normal((50, 8))
    mixed = np.random.default_rng(1).permutation(points)
    assert frechet_distance(points, points) < 1e-6
    assert frechet_distance(mixed, points + 1) == pytest.approx(
        frechet_distance(points, points + 1)
    )
    few = np.ones((3, 8))  # fewer points than dimensions: singular covariances
    assert frechet_distance(few, few) == 0


def test_the_classifier_reads_held_out_digits_and_its_features_tell_noise_from_them():
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))  # it is grouped by writer
    train, test = order[300:], order[:300]
    state = torch.random.get_rng_state()
    model = train_classifier(images[train], labels[train], torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    known, _ = model.read(images[train])
    features, classes = model.read(images[test])
    assert (classes.argmax(axis=1) == labels[test]).mean() > 0.9
    mixed = np.random.default_rng(0).permuted(images[test].reshape(300, -1), axis=1)
    scattered, _ = model.read(mixed.reshape(images[test].shape))
    assert frechet_distance(scattered, known) > 5 * frechet_distance(features, known)


@pytest.mark.parametrize("vocab_size", [2, 16, 256])
def test_local_samples_have_the_neighbours_of_the_data_and_nothing_else(vocab_size: int):
    stripes = np.zeros((40, 6, 6), np.uint8)
    stripes[::2, :, 0::2] = vocab_size - 1  # half of the images begin with a stripe, half without
    stripes[1::2, :, 1::2] = vocab_size - 1
    drawn = local_samples(stripes, 60, vocab_size)
    known = {image.tobytes() for image in stripes}
    assert {image.tobytes() for image in drawn} == known  # neighbours decide everything here
    flat = np.zeros((40, 6, 6), np.uint8)
    flat[::2] = vocab_size - 1
    both = np.random.default_rng(0).integers(0, vocab_size, (200, 6, 6)).astype(np.uint8)
    assert len({image.tobytes() for image in local_samples(both, 50, vocab_size)}) == 50
    assert {image.tobytes() for image in local_samples(flat, 50, vocab_size)} == {
        image.tobytes() for image in flat
    }


def test_local_samples_fall_back_to_fewer_neighbours():
    one = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)  # every token is at one place only
    other = one.transpose(0, 2, 1).copy()
    drawn = local_samples(np.concatenate([one, other]), 20, 9)
    assert drawn.shape == (20, 3, 3) and drawn.max() < 9


def test_local_samples_are_the_same_for_the_same_seed():
    known = np.random.default_rng(0).integers(0, 16, (20, 5, 7)).astype(np.uint8)
    assert np.array_equal(local_samples(known, 8, 16), local_samples(known, 8, 16))
    assert not np.array_equal(local_samples(known, 8, 16), local_samples(known, 8, 16, seed=1))
