"""Grids of images."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from memtrain.plotting.image_grid import PAPER, save_grid


def pixels(path: Path) -> np.ndarray:
    return np.rint(imread(path)[..., :3] * 255).astype(int)


def test_small_images_are_enlarged_and_tiled(tmp_path: Path):
    pictures = np.zeros((5, 8, 8), np.uint8)
    pictures[0, 0, 0] = 255
    save_grid(tmp_path / "deep" / "grid.png", pictures)
    shown = pixels(tmp_path / "deep" / "grid.png")
    assert shown.shape == (2 * 54 + 6, 3 * 54 + 6, 3)  # 2 rows of 3; 8 pixels become 48
    assert (shown[:6] == PAPER).all() and (shown[6:12, 6:12] == 255).all()
    assert (shown[6, 12] == 0).all()
    assert (shown[60:108, 114:] == PAPER).all()  # the sixth place is empty


def test_originals_are_above_completions_whose_generated_part_is_tinted(tmp_path: Path):
    originals = np.full((10, 48, 48), 255, np.uint8)
    completed = np.zeros((10, 48, 48), np.uint8)
    made = np.zeros((48, 48), np.uint8)
    made[24:] = 1
    save_grid(tmp_path / "grid.png", completed, originals=originals, made=made)
    shown = pixels(tmp_path / "grid.png")
    assert shown.shape == (4 * 50 + 2, 8 * 50 + 2, 3)  # 8 and 2, each with its originals
    assert (shown[2:50, 2:50] == 255).all()
    assert (shown[52:76, 2:50] == 0).all()
    tint = shown[76:100, 2:50].reshape(-1, 3)
    assert len(set(map(tuple, tint))) == 1 and tint[0].max() > tint[0].min()  # a colour, no grey
