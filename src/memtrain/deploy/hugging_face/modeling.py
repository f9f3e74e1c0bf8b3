"""A trained network as a causal language model of the transformers package.

`memtrain export RUN --hf DIR` copies this module into DIR together with the definitions of memtrain
that it uses (code.py), so it needs memtrain only where it is part of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from memtrain.config import CellConfig
from memtrain.models.cells import GRUCell, LSTMCell, MLPCell, TransformerCell
from memtrain.models.layers import Rotary
from memtrain.models.teacher import Decoder

EXPORTED_CELLS = {
    "transformer": TransformerCell,
    "mlp": MLPCell,
    "gru": GRUCell,
    "lstm": LSTMCell,
}
CODE_MODULE = "modeling_memtrain"
"""The name of the copy."""
AUTO_MAP = {
    "AutoConfig": f"{CODE_MODULE}.MemtrainConfig",
    "AutoModelForCausalLM": f"{CODE_MODULE}.MemtrainForCausalLM",
}
"""Where transformers finds the classes of a folder."""
NO_LABEL = -100
"""The label of a position without a target."""
MOST_ROWS = 2**15
"""Attention kernels of GPUs refuse batches of more than 65,535 rows."""


class MemtrainConfig(PreTrainedConfig):
    """The sizes of a cell and its readout, and the special tokens."""

    model_type = "memtrain"

    def __init__(
        self,
        vocab_size: int = 256,
        cell: dict[str, Any] | None = None,
        readout: dict[str, Any] | None = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        auto_map: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            vocab_size: the tokens, special ones included.
            cell: fields of CellConfig; the paper's sizes unless given.
            readout: `causal`, and the fields of TeacherConfig that Decoder uses.
            use_cache: return the memory with the logits.
            pad_token_id: of padding.
            bos_token_id: begins a sequence.
            eos_token_id: ends a sequence.
            tie_word_embeddings: not supported.
            auto_map: where transformers finds the code; beside the weights unless given.
            options: see PreTrainedConfig.
        """
        if tie_word_embeddings:
            raise ValueError("tie_word_embeddings: must be False; the readout has its own weights")
        self.vocab_size = vocab_size
        self.cell = cell or {}
        self.readout = readout or {}
        self.use_cache = use_cache
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self.auto_map = auto_map or AUTO_MAP
        super().__init__(**options)


class MemoryLayer(CacheLayerMixin):
    """The memory of all that was read, and the number of tokens; nothing grows."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.memory: Float[Tensor, "B M D"] | None = None
        self.length = 0

    def replace(self, memory: Float[Tensor, "B M D"], tokens: int) -> None:
        """Store the memory after `tokens` more tokens, padding included."""
        self.memory, self.length, self.is_initialized = memory, self.length + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("past_key_values: holds a memory, and no keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise TypeError("past_key_values: holds a memory, and no keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        """There is no longest sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """What earlier versions of transformers call `get_max_length`."""
        return -1

    def crop(self, max_length: int, *args: Any, **kwargs: Any) -> None:
        raise ValueError("past_key_values: a memory cannot forget its last tokens; read them again")

    def reset(self) -> None:
        self.memory, self.length, self.is_initialized = None, 0, False

    def offload(self) -> None:
        """Does nothing: a memory is small."""

    def prefetch(self) -> None:
        """Does nothing: it was not offloaded."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.memory is not None:
            self.memory = self.memory[indices.to(self.memory.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.memory is not None:
            self.memory = self.memory.repeat_interleave(repeats, dim=0)


class MemoryCache(Cache):
    """The past of every row as one memory: `past_key_values` of MemtrainForCausalLM.

    Example: `model(ids, past_key_values=MemoryCache())`
    """

    def __init__(self) -> None:
        super().__init__(layers=[MemoryLayer()])

    @property
    def past(self) -> MemoryLayer:
        """Its one layer."""
        layer = self.layers[0]
        assert isinstance(layer, MemoryLayer)
        return layer


class MemtrainForCausalLM(PreTrainedModel, GenerationMixin):
    """A cell, read token after token from the empty memory, and its readout.

    The logits at a position predict the next token. A token costs the same however long the past
    is, and `past_key_values` is one memory per row. Weights are in 32 bits whatever `dtype` is
    asked for; `torch.autocast` computes in 16.
    """

    config_class = MemtrainConfig
    config: MemtrainConfig
    base_model_prefix = ""
    _is_stateful = True
    _keep_in_fp32_modules_strict = ["cell", "readout"]
    copy_code: Callable[[str], None] | None = None
    """Writes this code into the folder of saved weights. None in such a copy, which transformers
    copies by itself."""

    def __init__(self, config: MemtrainConfig) -> None:
        super().__init__(config)
        cell = CellConfig(**config.cell)
        if cell.kind not in EXPORTED_CELLS:
            raise ValueError(f"cell.kind={cell.kind!r}: must be one of {', '.join(EXPORTED_CELLS)}")
        self.cell = EXPORTED_CELLS[cell.kind](cell, config.vocab_size)
        self.readout = Decoder(
            vocab_size=config.vocab_size, memory_dim=cell.memory_dim, **config.readout
        )
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`generate` makes no cache of keys and values; `forward` makes its own."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize what the weights file does not hold."""
        if isinstance(module, Rotary):  # loading leaves its tables undefined
            module._fill(len(module.cosine), module.cosine.device)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.cell.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.cell.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.readout.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.readout.head = new_embeddings

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *args, **options)
        if self.copy_code is not None:
            self.copy_code(save_directory)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Read tokens: the logits of the token after each.

        Args:
            input_ids: the tokens.
            attention_mask: 0 where there is padding, which leaves a row's memory as it is; of these
                tokens, or of the past and these.
            past_key_values: the memory of the past, which is changed; the empty one unless given.
            labels: usually `input_ids`; -100 where there is no target. Padding is none, nor is the
                first token of a row.
            use_cache: return the memory; on unless the model is being trained.
            logits_to_keep: only the logits of the last positions, if not 0, or of these positions.
            return_dict: return a tuple if False.
            options: `num_items_in_batch` for the loss; others are ignored.
        """
        if input_ids is None:
            raise ValueError("input_ids: must be given; a cell embeds its tokens itself")
        if past_key_values is not None and not isinstance(past_key_values, MemoryCache):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values={kind}: must be a MemoryCache, or left out")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = past_key_values or MemoryCache()
        read = self._read(input_ids, attention_mask)
        memories, memory = self._unroll(input_ids, read, cache.past.memory, logits_to_keep)
        logits = self._predict(memories)
        loss = None if labels is None else self._loss(logits, labels, read, **options)
        cache.past.replace(memory, input_ids.shape[1])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache if use_cache else None,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    def _read(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None
    ) -> Bool[Tensor, "B T"]:
        """Which tokens are read: all but padding."""
        if attention_mask is None:
            return torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask.dim() != 2 or attention_mask.shape[1] < input_ids.shape[1]:
            shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask: must have shape (B, T), not {shape}")
        return attention_mask[:, -input_ids.shape[1] :] != 0

    def _unroll(
        self,
        tokens: Int[Tensor, "B T"],
        read: Bool[Tensor, "B T"],
        memory: Float[Tensor, "B M D"] | None,
        keep: int | Tensor,
    ) -> tuple[Float[Tensor, "B K M D"], Float[Tensor, "B M D"]]:
        """The memories after the positions to keep, and after the last."""
        if memory is None:
            shape = (len(tokens), self.cell.memory_tokens, self.cell.memory_dim)
            memory = torch.zeros(shape, device=tokens.device)
        whole = bool(read.all())  # one look saves a copy of the memory per step
        first = tokens.shape[1] - keep if isinstance(keep, int) and keep else 0
        memories = []
        for step, token in enumerate(tokens.unbind(1)):
            after = self.cell(memory, token)
            memory = after if whole else after.where(read[:, step, None, None], memory)
            if step >= first:
                memories.append(memory)
        kept = torch.stack(memories, dim=1)
        assert memory is not None
        return kept if isinstance(keep, int) else kept[:, keep], memory

    def _predict(self, memories: Float[Tensor, "B K M D"]) -> Float[Tensor, "B K V"]:
        parts = memories.flatten(0, 1).split(MOST_ROWS)
        logits = torch.cat([self.readout(part)[:, 0] for part in parts])
        return logits.unflatten(0, memories.shape[:2])

    def _loss(
        self,
        logits: Float[Tensor, "B K V"],
        labels: Int[Tensor, "B T"],
        read: Bool[Tensor, "B T"],
        **options: Any,
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy of the labels after the first, each with the logits before it."""
        if logits.shape[1] != labels.shape[1]:
            raise ValueError("labels: need the logits of all positions; leave logits_to_keep out")
        begun = nn.functional.pad(read.cumsum(dim=1)[:, :-1] > 0, (1, 0))
        labels = labels.masked_fill(~(read & begun), NO_LABEL)
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options
        )
