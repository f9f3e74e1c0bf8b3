"""What a stage notes along the way."""

import math
from types import SimpleNamespace
from typing import Any

from memtrain.stage import StageLoop


def test_the_best_is_the_lowest_finite_loss():
    progress: dict[str, Any] = {"global_step": 0}
    loop: Any = SimpleNamespace(name="smt", progress=progress, trainer=SimpleNamespace(step=0))
    noted = []
    for nats in (math.nan, 2.0, 1.0, math.nan, 3.0, -math.inf, 0.5):
        progress["global_step"] += 1
        if StageLoop._is_best(loop, nats):
            noted.append(progress["best"]["nats"])
    assert noted == [2.0, 1.0, 0.5]
    assert progress["best"]["global_step"] == 7
