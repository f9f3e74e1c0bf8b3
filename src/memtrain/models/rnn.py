"""The RNN: a cell, a readout and the empty memory. It needs no teacher."""

import reprlib
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.config import TeacherConfig
from memtrain.config.validation import config_from
from memtrain.errors import MemtrainError
from memtrain.models.attention import AttentionCell, AttentionReadout
from memtrain.models.check_cell import check_cell, check_kind, memory_shape
from memtrain.models.layers import Replaceable
from memtrain.models.sampler import Choose
from memtrain.models.teacher import Decoder, Teacher, count_parameters
from memtrain.shapes import (
    Inputs,
    Space,
    Token,
    Values,
    describe_space,
    free_to_read,
    named,
    space_of,
)


class RNN(Replaceable):
    """A recurrent network that reads input after input in constant time and memory.

    Inputs are tokens, or numbers if it was made for `Values`; it returns logits of the next token,
    or the parameters of the distribution of the next numbers.

    Example:
        memory = rnn.empty_memory(batch_size=1)
        for token in tokens:
            logits, memory = rnn.step(memory, token)

    or, whole sequences (B, T) at once, `logits = rnn(tokens)`.
    """

    def __init__(
        self,
        cell: nn.Module,
        readout: Decoder | AttentionReadout | Teacher | None = None,
        *,
        vocab_size: int = 0,
        values: Values | None = None,
        **sizes: Any,
    ) -> None:
        """
        Args:
            cell: one step, forward(memory (B, M, D), token (B,)) -> memory (B, M, D).
            readout: from a memory to the logits of the next target; given a teacher, a new one of
                the shape of its decoder, which SMT copies into it.
            vocab_size: the number of tokens, if no readout is given.
            values: what sequences are, if they are numbers, and no readout is given.
            sizes: width, decoder_layers, heads and other fields of TeacherConfig, if no readout is
                given; an attention cell has none, its readout is linear.

        Raises:
            CellContractError: the cell breaks a rule.
        """
        super().__init__()
        check_kind(cell)
        if not isinstance(readout, Decoder | AttentionReadout | Teacher | None):
            raise MemtrainError(
                f"readout={type(readout).__name__}: must be a memtrain.Decoder, or the "
                "memtrain.Teacher whose decoder it will copy"
            )
        if isinstance(readout, Decoder | AttentionReadout):
            self._refuse(vocab_size=vocab_size, values=values, **sizes)
            self._check_width(cell, readout)
        elif isinstance(cell, AttentionCell):
            if readout is not None:
                sizes = {"readout": readout, **sizes}
            readout = self._attention_readout(cell, vocab_size, values, sizes)
        else:
            if isinstance(readout, Teacher):
                self._refuse(vocab_size=vocab_size, values=values, **sizes)
                config, space = readout.config, readout.space
            else:
                config = config_from(TeacherConfig, None, sizes)
                space = space_of(vocab_size, values)
            readout = Decoder(config, memory_dim=memory_shape(cell)[1], **named(space))
            check_cell(cell, **named(space))
        self.cell = cell
        self.readout = readout

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("cell", "readout"):
            self.fast = None  # made for the parts before
        super().__setattr__(name, value)

    @staticmethod
    def _refuse(**sizes: Any) -> None:
        """Refuse sizes beside a readout, which has its own."""
        for name, size in sizes.items():
            if size:
                raise MemtrainError(f"{name}={size!r}: must be left out; the readout has its own")

    @staticmethod
    def _check_width(cell: nn.Module, readout: Decoder | AttentionReadout) -> None:
        """Refuse a decoder of memories of another width."""
        dim = memory_shape(cell)[1]
        if isinstance(readout, Decoder) and readout.memory_dim != dim:
            raise MemtrainError(
                f"readout: reads memory tokens of width {readout.memory_dim}, those of the cell "
                f"have {dim}; Decoder(memory_dim={dim}, ...)"
            )

    @staticmethod
    def _attention_readout(
        cell: AttentionCell, vocab_size: int, values: Values | None, given: dict[str, Any]
    ) -> AttentionReadout:
        """The readout of a plain Transformer, which has no teacher."""
        own = cell.embedding.num_embeddings
        for name, value in given.items():
            raise MemtrainError(
                f"{name}={value!r}: must be left out; an attention cell has a linear readout and "
                f"is trained by BPTT alone: RNN(cell, vocab_size={own})"
            )
        space = space_of(vocab_size, values)
        if space != own:
            name = "values" if isinstance(space, Values) else "vocab_size"
            raise MemtrainError(f"{name}={space}: the cell reads tokens, vocab_size={own}")
        return AttentionReadout(cell.embedding.embedding_dim, own)

    @property
    def space(self) -> Space:
        """What its sequences consist of: the size of a vocabulary, or values."""
        return self.readout.space

    @property
    def vocab_size(self) -> int:
        """The number of tokens that it predicts; 0 if it predicts numbers."""
        return 0 if isinstance(self.space, Values) else self.space

    def __repr__(self) -> str:
        tokens, dim = memory_shape(self.cell)
        return (
            f"<{type(self).__name__}: {type(self.cell).__name__}, memory {tokens} x {dim}, "
            f"{describe_space(self.space)}, {count_parameters(self):,} parameters>"
        )

    def empty_memory(self, batch_size: int) -> Float[Tensor, "B M D"]:
        """The memory of having read nothing: zeros, in float64 of a model in float64."""
        weight = self.readout.head.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        shape = memory_shape(self.cell)
        return torch.zeros(batch_size, *shape, dtype=exact, device=weight.device)

    def step(
        self, memory: Float[Tensor, "B M D"], token: Token
    ) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B M D"]]:
        """Read one token per row: the logits of its target, and the new memory.

        Raises:
            MemtrainError: the memory or the tokens are not what the model takes.
        """
        self._check_memory(memory)
        try:
            after = self.cell(memory, token)
            return self.predict(after), after
        except Exception:
            # Checked only now: reading the tokens on the host would stall a GPU at every step.
            self.check_tokens("token", token, len(memory))
            raise

    def forward(self, tokens: Inputs) -> Float[Tensor, "B T V"]:
        """Read sequences from the empty memory: the logits of the target of each token.

        Gradients pass through all steps; `torch.no_grad()` reads without them, and faster.

        Raises:
            MemtrainError: the tokens are not what the model takes.
        """
        self.check_tokens("tokens", tokens)
        return self.predict(self.unroll(tokens))

    def _check_memory(self, memory: object, rows: int | None = None) -> None:
        shape = ", ".join(map(str, ("B" if rows is None else rows, *memory_shape(self.cell))))
        found = tuple(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
        right = isinstance(found, tuple) and found[1:] == memory_shape(self.cell)
        if not right or rows not in (None, found[0]):
            raise MemtrainError(
                f"memory: must be a tensor of shape ({shape}), not {found}; "
                "rnn.empty_memory(batch_size) makes one"
            ) from None

    def check_tokens(self, name: str, tokens: object, rows: int | None = None) -> None:
        """Refuse anything but a tensor of tokens, (rows,) or, without `rows`, (B, T); of a network
        that reads numbers, anything but (rows, X) or (B, T, X)."""
        self._check_precision()
        if isinstance(self.space, Values):
            return self._check_values(name, tokens, rows, self.space)
        example = "torch.tensor([[3, 0, 5]])" if rows is None else "torch.tensor([3])"
        if not isinstance(tokens, Tensor):
            raise MemtrainError(
                f"{name}={reprlib.repr(tokens)}: must be a tensor of whole numbers, such as "
                f"{example}"
            ) from None
        shape = "(B, T)" if rows is None else f"({rows},), as many as memory has rows"
        right = tokens.dim() == 2 if rows is None else tokens.shape == (rows,)
        if not right or not tokens.numel():
            raise MemtrainError(
                f"{name}: must have shape {shape}, not {tuple(tokens.shape)}; such as {example}"
            ) from None
        if tokens.dtype not in (torch.long, torch.int32):
            raise MemtrainError(
                f"{name}: must be int64, not {tokens.dtype}; {name}.long()"
            ) from None
        self._check_device(name, tokens)
        last = self.space - 1
        if free_to_read(tokens) and bool((outside := (tokens < 0) | (tokens > last)).any()):
            raise MemtrainError(
                f"{name}: contains {int(tokens[outside][0])}, outside the vocabulary 0..{last}"
            ) from None

    def _check_precision(self) -> None:
        """Refuse weights of 16 bits, which cannot read the memory: it is fp32 at least."""
        weight = self.readout.head.weight
        if weight.dtype.itemsize == 2 and not torch.is_autocast_enabled(weight.device.type):
            kind = weight.device.type
            raise MemtrainError(
                f"rnn: its weights are {weight.dtype}, and a memory is float32; take rnn.float() "
                f"under torch.autocast({kind!r}, {weight.dtype})"
            ) from None

    def _check_values(self, name: str, found: object, rows: int | None, values: Values) -> None:
        shape = f"({'B, T' if rows is None else rows}, {values.features})"
        if not isinstance(found, Tensor) or not found.is_floating_point():
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise MemtrainError(
                f"{name}={kind}: must be a tensor of floats, {shape}; this model reads numbers"
            ) from None
        right = found.shape[-1:] == (values.features,) and found.numel() > 0
        if not right or found.dim() != (3 if rows is None else 2) or rows not in (None, len(found)):
            raise MemtrainError(
                f"{name}: must have shape {shape}, not {tuple(found.shape)}; an input has "
                f"{values.targets} target numbers and {values.known} known ones"
            ) from None
        self._check_device(name, found)
        if free_to_read(found) and bool(found.isinf().any()):
            raise MemtrainError(
                f"{name}: contains infinity; numbers must be finite, or NaN where they are missing"
            ) from None

    def _check_device(self, name: str, found: Tensor) -> None:
        device = self.readout.head.weight.device
        if found.device != device:
            raise MemtrainError(
                f"{name}: must be on {device}, where the model is, not on {found.device}; "
                f"{name}.to({str(device)!r})"
            ) from None

    def predict(
        self, memory: Float[Tensor, "*rows M D"], hidden: bool = False
    ) -> Float[Tensor, "*rows _"]:
        """Logits of the next target, or the parameters of its distribution.

        With `hidden`, the hidden states of which the readout's head makes them.
        """
        rows = memory.shape[:-2]
        # Attention kernels of GPUs refuse batches of more than 65,535 rows.
        every = memory.flatten(0, -3).split(2**15)
        parts = [self.readout(part, hidden=hidden)[:, 0] for part in every]
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs.unflatten(0, rows)

    def write(
        self,
        memory: Float[Tensor, "B M D"],
        uniforms: Float[Tensor, "T B"],
        choose: Choose,
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B M D"]]:
        """Sample tokens, each read before the next: the tokens, and the memory after the last."""
        if self.fast is not None:
            written = self.fast.write(memory, uniforms, choose)
            if written is not None:
                return written
        if isinstance(self.cell, AttentionCell):
            return self.cell.write(memory, uniforms, choose, self.predict)
        tokens = []
        for uniform in uniforms:
            tokens.append(choose(self.predict(memory), uniform))
            memory = self.cell(memory, tokens[-1])
        return torch.stack(tokens, dim=1), memory

    def unroll(
        self, inputs: Inputs, memory: Float[Tensor, "B M D"] | None = None
    ) -> Float[Tensor, "B T M D"]:
        """The memories after each input, step by step, from `memory` or the empty one.

        Raises:
            MemtrainError: the inputs or the memory are not what the model takes.
        """
        try:
            return self._unroll(inputs, memory)
        except Exception:  # checked only now, as in `step`
            self.check_tokens("inputs", inputs)
            if memory is not None:
                self._check_memory(memory, len(inputs))
            raise

    def _unroll(self, inputs: Inputs, memory: Float[Tensor, "B M D"] | None) -> Tensor:
        if isinstance(self.cell, AttentionCell):  # it computes all steps at once
            return self.cell.unroll(inputs, memory)
        if memory is None:
            memory = self.empty_memory(len(inputs))
        if self.fast is not None:
            unrolled = self.fast.unroll(inputs, memory)
            if unrolled is not None:
                return unrolled
        memories = []
        for token in inputs.unbind(1):
            memory = self.cell(memory, token)
            memories.append(memory)
        return torch.stack(memories, dim=1)

    @torch.no_grad()
    def read(
        self, inputs: Inputs, memory: Float[Tensor, "B M D"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T M D"]]:
        """Logits and memories after each input, without gradients."""
        memories = self.unroll(inputs, memory)
        return self.predict(memories), memories

    def unroll_last(
        self, inputs: Int[Tensor, "N K"] | Float[Tensor, "N K X"], memory: Float[Tensor, "N M D"]
    ) -> Float[Tensor, "N M D"]:
        """The memory after the last of a few inputs, for many rows in parallel."""
        if self.fast is not None:
            last = self.fast.unroll_last(inputs, memory)
            if last is not None:
                return last
        for token in inputs.unbind(1):
            memory = self.cell(memory, token)
        return memory
