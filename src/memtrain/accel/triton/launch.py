"""What launches share: how many multiprocessors there are, and what runs over a large product."""

import torch
import triton
from torch import Tensor

from memtrain.accel import hopper


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter stands for two."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


class Launch:
    """Which programs run over an (R, I) by (I, O) product, and what each is told."""

    def __init__(self, x: Tensor, outer: int, tile: dict[str, int]) -> None:
        self.rows, self.inner = x.shape
        self.outer = outer
        self.BR, self.BI, self.BO = tile["BR"], tile["BI"], tile["BO"]
        self.row_tiles = triton.cdiv(self.rows, self.BR)
        self.column_tiles = triton.cdiv(outer, self.BO)
        self.grid = (self.row_tiles * self.column_tiles,)
        self.constants = {"INNER": self.inner, "OUTER": outer, **tile}


def on_hopper(x: Tensor, weight: Tensor, columns: int) -> bool:
    """Whether the kernels in `hopper` serve a large product of x, (R, I), whose columns are taken
    that many at a time: they are written for rows of the paper's size."""
    whole = x.is_contiguous() and weight.is_contiguous()
    large = x.shape[0] > 4096 and x.shape[1] == 256 and columns % 256 == 0
    return large and whole and hopper.serves(x, weight)
