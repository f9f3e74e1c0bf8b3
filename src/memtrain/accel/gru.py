"""A GRU unrolled layer by layer in torch's own loop over time, which on a GPU is cuDNN's.

A layer needs the states of the one below and nothing of those above, so that each can be unrolled
over all steps before the next begins: what comes from below is one product for all of them.
"""

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.models.cells import GRUCell


class UnrolledGRU:
    """Stands in for the loop over a GRU cell, with and without autograd."""

    def serves(self, cell: nn.Module, memory: Tensor) -> bool:
        return type(cell) is GRUCell

    def __call__(
        self, cell: nn.Module, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        assert isinstance(cell, GRUCell)
        layers = []
        with torch.autocast(memory.device.type, enabled=False), warnings.catch_warnings():
            # Weights of cells do not lie in one piece; cuDNN copies them, which is soon done.
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
                    train=torch.is_grad_enabled(),  # cuDNN keeps what its gradient needs
                    bidirectional=False,
                    batch_first=True,
                )
                layers.append(below)
        return torch.stack(layers, dim=2)
