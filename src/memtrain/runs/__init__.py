"""A run on disk and its processes: folder, ownership, progress, checkpoints, several devices.

`memtrain.runs` is this package, and also the function that lists runs: `memtrain.runs("runs")`.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Runs(ModuleType):
    """The module, callable."""

    def __call__(self, folder: Path | str = "runs") -> Any:
        """The runs below a folder as a pandas DataFrame (see listing.py)."""
        from memtrain.runs.listing import runs_frame

        return runs_frame(folder)


sys.modules[__name__].__class__ = _Runs
