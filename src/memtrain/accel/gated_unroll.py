"""Whole-sequence unrolling of a GRU and an LSTM, on every device.

A layer reads the states of the layer below alone, so each is unrolled over all steps before the
next: its input products are then one product.
"""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from memtrain.models.cells import GRUCell, LSTMCell
from memtrain.models.layers import refuse_second_derivatives
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


class UnrolledLSTM:
    """Replaces the loop over an LSTM cell, layer by layer.

    Unlike torch's own whole-sequence loop it returns c of every step, which a memory has too.
    """

    def serves(self, cell: nn.Module, memory: Tensor) -> bool:
        """Whether it is our cell."""
        return type(cell) is LSTMCell

    def __call__(
        self, cell: nn.Module, inputs: Inputs, memory: Float[Tensor, "B M D"]
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input."""
        assert isinstance(cell, LSTMCell)
        states: list[Tensor] = []
        with torch.autocast(memory.device.type, enabled=False):
            below = cell.embedding(inputs.transpose(0, 1))  # (T, B, D)
            before = memory.to(cell.embedding.weight.dtype).unbind(1)
            for layer, h, c in zip(cell.layers, before[::2], before[1::2], strict=True):
                assert isinstance(layer, nn.LSTMCell)
                from_input = linear(below, layer.weight_ih, layer.bias_ih + layer.bias_hh)
                after = _UnrolledLayer.apply(
                    from_input, h.contiguous(), c.contiguous(), layer.weight_hh
                )
                assert isinstance(after, tuple)
                below, _ = after
                states += [state.transpose(0, 1) for state in after]
        return torch.stack(states, dim=2)


class _UnrolledLayer(torch.autograd.Function):
    """h and c of one layer of an LSTM after each step, each (T, B, D).

    The gates of a step are (B, G), G = 4·D, in torch's order: input, forget, proposal, output.
    """

    @staticmethod
    def forward(
        ctx,
        from_input: Float[Tensor, "T B G"],
        h: Float[Tensor, "B D"],
        c: Float[Tensor, "B D"],
        weight: Float[Tensor, "G D"],
    ) -> tuple[Tensor, Tensor]:
        unroll = _unroll_fused if _has_fused_cell(h) else _unroll
        hs, cs, gates = unroll(from_input, h, c, weight)
        ctx.save_for_backward(h, c, weight, hs, cs, gates)
        return hs, cs

    @staticmethod
    def backward(ctx, of_hs: Tensor, of_cs: Tensor):  # type: ignore[override]
        refuse_second_derivatives("the whole-sequence LSTM")
        h, c, weight, hs, cs, gates = ctx.saved_tensors
        h_before, c_before = (torch.cat([a[None], b[:-1]]) for a, b in ((h, hs), (c, cs)))
        # Of the states before the first step, then after each: gradients are added to them.
        of_h, of_c = (torch.cat([torch.zeros_like(h)[None], given]) for given in (of_hs, of_cs))
        back = _back_fused if _has_fused_cell(h) else _back
        of_gates, of_weight = back(of_h, of_c, c_before, cs, gates, weight), None
        if ctx.needs_input_grad[3]:
            of_weight = of_gates.flatten(0, 1).T @ h_before.flatten(0, 1)
        return of_gates, of_h[0], of_c[0], of_weight


def _has_fused_cell(state: Tensor) -> bool:
    """Whether torch has kernels for the pointwise operations of an LSTM's step here."""
    return state.is_cuda


def _steps(*parts: Float[Tensor, "T ..."]) -> list[tuple[Tensor, ...]]:
    """The parts of each step; views made one by one in a loop would cost more."""
    return list(zip(*(part.unbind() for part in parts), strict=True))


def _unroll(
    from_input: Float[Tensor, "T B G"],
    h: Float[Tensor, "B D"],
    c: Float[Tensor, "B D"],
    weight: Float[Tensor, "G D"],
) -> tuple[Float[Tensor, "T B D"], Float[Tensor, "T B D"], Float[Tensor, "T B G"]]:
    """h, c and the gates of each step."""
    hs, cs = (h.new_empty(len(from_input), *h.shape) for _ in range(2))
    gates, tanh, into_gates = from_input.clone(), torch.empty_like(c), weight.T
    each = gates.unflatten(-1, (4, -1))
    for gate, i_and_f, i, f, g, o, h_after, c_after in _steps(
        gates, each[:, :, :2], *each.unbind(2), hs, cs
    ):
        gate.addmm_(h, into_gates)
        i_and_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        c = torch.mul(f, c, out=c_after).addcmul_(i, g)
        h = torch.mul(o, torch.tanh(c, out=tanh), out=h_after)
    return hs, cs, gates


def _back(
    of_h: Float[Tensor, "_ B D"],
    of_c: Float[Tensor, "_ B D"],
    c_before: Float[Tensor, "T B D"],
    cs: Float[Tensor, "T B D"],
    gates: Float[Tensor, "T B G"],
    weight: Float[Tensor, "G D"],
) -> Float[Tensor, "T B G"]:
    """The gradient of the gates before sigmoid and tanh, from that of T + 1 states, in place."""
    i, f, g, o = gates.unflatten(-1, (4, -1)).unbind(2)
    tanh = cs.tanh()
    # Derivatives of c by three gates, of h by the output gate and by c; that of c by c before is f.
    c_by_gates = torch.stack([g * i * (1 - i), c_before * f * (1 - f), i * (1 - g * g)], dim=2)
    h_by_o, h_by_c = tanh * o * (1 - o), o * (1 - tanh * tanh)
    of_gates = torch.empty_like(gates)
    each = of_gates.unflatten(-1, (4, -1))
    steps = _steps(
        *(of_h[:-1], of_h[1:], of_c[:-1], of_c[1:], of_c[1:, :, None]),
        *(c_by_gates, h_by_o, h_by_c, f, of_gates, each[:, :, :3], each[:, :, 3]),
    )
    for step in reversed(steps):
        dh_before, dh, dc_before, dc, dc_thrice, by_gates, by_o, by_c, kept, dgate, difg, do = step
        dc.addcmul_(dh, by_c)
        torch.mul(dc_thrice, by_gates, out=difg)
        torch.mul(dh, by_o, out=do)
        dc_before.addcmul_(dc, kept)
        dh_before.addmm_(dgate, weight)
    return of_gates


def _unroll_fused(
    from_input: Float[Tensor, "T B G"],
    h: Float[Tensor, "B D"],
    c: Float[Tensor, "B D"],
    weight: Float[Tensor, "G D"],
) -> tuple[Float[Tensor, "T B D"], Float[Tensor, "T B D"], Float[Tensor, "T B G"]]:
    """As `_unroll`, with torch's kernel for all but the product of a step."""
    after: list[tuple[Tensor, ...]] = []
    for given in from_input.unbind():
        h, c, gate = torch.ops.aten._thnn_fused_lstm_cell(given, h @ weight.T, c)
        after.append((h, c, gate))
    hs, cs, gates = (torch.stack(parts) for parts in zip(*after, strict=True))
    return hs, cs, gates


def _back_fused(
    of_h: Float[Tensor, "_ B D"],
    of_c: Float[Tensor, "_ B D"],
    c_before: Float[Tensor, "T B D"],
    cs: Float[Tensor, "T B D"],
    gates: Float[Tensor, "T B G"],
    weight: Float[Tensor, "G D"],
) -> Float[Tensor, "T B G"]:
    """As `_back`, with torch's kernel for all but the product and a sum of a step."""
    of_gates: list[Tensor] = []
    steps = _steps(of_h[:-1], of_h[1:], of_c[:-1], of_c[1:], c_before, cs, gates)
    for dh_before, dh, dc_before, dc, before, after, gate in reversed(steps):
        dgate, passed, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
            dh, dc, before, after, gate, has_bias=False
        )
        dc_before.add_(passed)
        dh_before.addmm_(dgate, weight)
        of_gates.append(dgate)
    return torch.stack(of_gates[::-1])
