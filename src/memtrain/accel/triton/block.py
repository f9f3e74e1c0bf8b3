"""A Transformer block from kernels: when it is for them, and in which precision."""

import torch
from torch import Tensor

from memtrain.accel.triton.attention_heads import fits
from memtrain.accel.triton.autograd import Attend, End, Finish
from memtrain.models.layers import Attention, Block, RMSNorm, Rotary


class KernelBlock:
    """What `nn.blocks.Block` calls in the place of its reference."""

    def __init__(self, block: Block) -> None:
        self.block = block

    @staticmethod
    def fits(block: Block) -> bool:
        """Whether all rows begin where descriptors ask for it."""
        return block.mlp_norm.weight.numel() % 16 == 0

    def serves(self, length: int) -> bool:
        """Whether attention is for it; `finish` always is."""
        return fits_heads(self.block.attention) and fits(length)

    def attend(
        self,
        x: Tensor,
        update: Tensor | None,
        rotary: Rotary,
        keep: slice | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """The stream with its update, and what the kept positions read there."""
        kind = _kind(x)
        layer = self.block.attention
        return Attend.apply(
            x.to(kind),
            None if update is None else update.to(kind),
            self.block.attention_norm.weight,
            layer.project_in.weight.to(kind),
            layer.project_out.weight.to(kind),
            *rotary.tables(kind),
            layer.heads,
            keep,
            causal,
        )

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with what was read, and the MLP of its norm."""
        kind = _kind(x)
        up, _, down = self.block.mlp
        return Finish.apply(
            x.to(kind),
            attended.to(kind),
            self.block.mlp_norm.weight,
            up.weight.to(kind),
            up.bias,
            down.weight.to(kind),
            down.bias,
        )

    def end(self, layer: RMSNorm, x: Tensor, update: Tensor) -> Tensor:
        """A stack's last norm, in fp32."""
        kind = _kind(x)
        return End.apply(x.to(kind), update.to(kind), layer.weight)


def fits_heads(layer: Attention) -> bool:
    """Tiles are powers of two; Triton 3.6 gets products with 16 columns wrong, and heads larger
    than 64 do not fit on the chip."""
    return layer.head_dim in (32, 64)


def _kind(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
