"""Whole-sequence unrolling of a GRU and an LSTM, on every device.

A layer reads the states of the layer below alone, so each is unrolled over all steps before the
next: its input products are then one product.
"""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memtrain.models.cells import GRUCell
from memtrain.shapes import Inputs


class UnrolledGRU:
    """Replaces the loop over a GRU cell by torch's own, cuDNN's on a GPU."""

    def serves(self, cell: nn.Module, memory: Tensor) -> bool:
        """Whether it is our cell."""
        return type(cell) is GRUCell

    def __call__(
        self, cell: nn.Module, inputs: Inputs, memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        assert isinstance(cell, GRUCell)
        layers = []
        with torch.autocast(memory.device.type, enabled=False), warnings.catch_warnings():
            # The weights are not one block of memory; cuDNN copies them, which is cheap.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single")
            below, memory = cell.embedding(inputs), memory.to(cell.embedding.weight.dtype)
            for layer, state in zip(cell.layers, memory.unbind(1), strict=True):
                assert isinstance(layer, nn.GRUCell)
                below, _ = torch.gru(
                    below,
                    state[None].contiguous(),
                    [layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh],
                    has_biases=True,
                    num_layers=1,
                    dropout=0.0,
                    train=torch.is_grad_enabled(),  # cuDNN stores activations for its gradient
                    bidirectional=False,
                    batch_first=True,
                )
                layers.append(below)
        return torch.stack(layers, dim=2)
