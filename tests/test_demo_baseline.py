"""A run beside another one: what becomes of it when something goes wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TINY
from memtrain.config import RunConfig
from memtrain.demo_baseline import BaselineProcess
from memtrain.errors import MemtrainError
from memtrain.training.reporter import Reporter


def bptt_alone() -> RunConfig:
    nothing = {name: replace(getattr(TINY, name), steps=0) for name in ("smt", "dmt")}
    return replace(TINY, bptt=replace(TINY.bptt, steps=1), **nothing)


def test_a_process_that_dies_is_no_end_of_waiting(tmp_path: Path):
    with BaselineProcess(bptt_alone(), tmp_path / "run", 1000) as baseline:
        baseline.process.kill()
        baseline.process.join()
        with pytest.raises(MemtrainError, match="ended, exit code -9"):
            baseline.finish(1.0, Reporter())


def test_leaving_early_leaves_no_process_behind(tmp_path: Path):
    with (
        pytest.raises(ZeroDivisionError),
        BaselineProcess(bptt_alone(), tmp_path / "run", 5) as baseline,
    ):
        raise ZeroDivisionError
    assert not baseline.process.is_alive()
