"""The digits, and pictures of them."""

import numpy as np
import pytest
import torch

from memtrain.config import Digits
from memtrain.data.digits import LEVELS, SIDE, DigitsTask
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
    assert (batch.inputs[:, 0] == task.spelling.start_token).all()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_evaluation_sees_each_test_image_once(task: DigitsTask):
    batch = task.held_out(10_000, torch.Generator().manual_seed(0))
    seen = {tuple(image) for image in batch.targets.tolist()}
    assert seen == {tuple(image) for image in task.test_images.tolist()}
    assert len(batch.targets) == len(task.test_images)


def test_ink_is_dark(task: DigitsTask):
    image = np.zeros((1, SIDE * SIDE), np.int64)
    image[0, 0] = LEVELS - 1
    picture = task.spelling.decode_images(image)
    assert picture[0, 0, 0] == 0 and picture[0, 0, 1] == 255


def test_a_person_can_read_a_digit_in_the_terminal(task: DigitsTask):
    image = task.test_images[0].tolist()
    drawn = task.describe([0] * 64, image).splitlines()
    assert len(drawn) == SIDE and all(len(line) == 2 * SIDE for line in drawn)
    darkest = image.index(max(image))
    assert drawn[darkest // SIDE][2 * (darkest % SIDE)] in "%@"
