"""The digits, and pictures of them."""

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from memtrain.config import Digits
from memtrain.data.images import LEVELS, SIDE, DigitsTask, save_grid
from memtrain.data.task import check_task


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    return DigitsTask(Digits())


def test_the_digits_keep_the_task_contract(task: DigitsTask):
    check_task(task)


def test_every_image_is_in_exactly_one_split(task: DigitsTask):
    together = torch.cat([task.train_images, task.test_images])
    assert len(together) == 1797
    assert len(task.test_images) == round(0.15 * 1797)
    assert int(together.max()) == LEVELS - 1 and int(together.min()) == 0


def test_a_pixel_is_predicted_from_those_before_it(task: DigitsTask):
    batch = task.sample(4, torch.Generator().manual_seed(0))
    assert (batch.inputs[:, 0] == task.start_token).all()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_evaluation_sees_each_test_image_once(task: DigitsTask):
    batch = task.held_out(10_000, torch.Generator().manual_seed(0))
    seen = {tuple(image) for image in batch.targets.tolist()}
    assert seen == {tuple(image) for image in task.test_images.tolist()}
    assert len(batch.targets) == len(task.test_images)


def test_a_grid_shows_ink_where_the_image_has_it(tmp_path: Path):
    image = torch.zeros(1, SIDE * SIDE, dtype=torch.long)
    image[0, 0] = LEVELS - 1
    save_grid(image, tmp_path / "deep" / "grid.png", scale=2)
    picture = imread(tmp_path / "deep" / "grid.png")
    assert picture.shape[:2] == (SIDE * 2 + 4, SIDE * 2 + 4)
    assert picture[2, 2, 0] == 0.0 and picture[2, 4, 0] == 1.0


def test_a_person_can_read_a_digit_in_the_terminal(task: DigitsTask):
    image = task.test_images[0].tolist()
    drawn = task.describe([0] * 64, image).splitlines()
    assert len(drawn) == SIDE and all(len(line) == 2 * SIDE for line in drawn)
    darkest = image.index(max(image))
    assert drawn[darkest // SIDE][2 * (darkest % SIDE)] in "%@"
