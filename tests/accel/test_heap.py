"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from pathlib import Path
from memtrain.recipes import recipe
from memtrain.training.run import Run
from memtrain.training.step import Trainer

run = Run(recipe("retrieval"), Path("nowhere"))
trainer = Trainer(run.objective("smt"), run.config.smt, run.task, run.engine, 0)
faults = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    trainer.train_step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults[-9:])[4])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_training_step_fetches_hardly_a_page_anew():
    """Without the setting it is 2,000 to 5,000 pages."""
    command = [sys.executable, "-c", FAULTS]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(found.stdout) < 300
