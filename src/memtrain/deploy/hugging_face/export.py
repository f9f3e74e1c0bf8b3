"""Write a trained network as a folder that transformers opens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from memtrain.data.codec import TokenCodec
from memtrain.deploy.hugging_face.card import model_card
from memtrain.deploy.hugging_face.code import CODE_FILE, write_code
from memtrain.deploy.hugging_face.modeling import (
    EXPORTED_CELLS,
    MemtrainConfig,
    MemtrainForCausalLM,
)
from memtrain.deploy.hugging_face.push import check_push, push_folder
from memtrain.deploy.hugging_face.tokenizer import (
    PADDING,
    START_OF_TEXT,
    ExportedTokenizer,
    export_tokenizer,
)
from memtrain.errors import MemtrainError
from memtrain.files import parse_json, read_text, write_atomic
from memtrain.generation.pretrained import Pretrained
from memtrain.models.teacher import Decoder
from memtrain.shapes import Values

MAX_CONFIG_BYTES = 2**20
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    CODE_FILE,
    "README.md",
)
"""What an export may write; without a text there is no tokenizer."""
READOUT_FIELDS = ("width", "decoder_layers", "heads", "head_dim", "rotary_fraction", "head_bias")
"""Fields of TeacherConfig that the readout uses."""

NEVER = -1e4
"""The logit of a token that is never predicted."""


@runtime_checkable
class PushOptions(Protocol):
    """The options of `memtrain export` that this format uses."""

    push: str | None


def write(model: Pretrained, path: Path, options: PushOptions) -> list[str]:
    """Write the folder, upload it if the options say so; returns the lines to print.

    Raises:
        MemtrainError: the network cannot be exported, the folder holds something else, there is no
            token to upload with, or the upload failed.
    """
    codec = check_exportable(model)
    check_folder(path)
    if options.push is not None:
        check_push(options.push)
    files = write_folder(model, codec, path, options.push or path.resolve().name)
    size = sum(parameter.numel() for parameter in model.parameters())
    lines = [f"{path}  {len(files)} files, {size:,} parameters"]
    if not codec.text:
        kind = "images" if codec.picture else "plain tokens"
        lines.append(f"no tokenizer: its sequences are {kind}; input_ids are their tokens")
    if options.push is not None:
        lines.append(push_folder(path, files, options.push))
    return lines


def check_exportable(model: Pretrained) -> TokenCodec:
    """The codec of a network of tokens with a built-in cell; any other is refused."""
    if isinstance(model.space, Values):
        raise MemtrainError(
            f"--hf: {model.name} reads numbers, and a language model of transformers reads tokens; "
            "memtrain.load_rnn opens its run in Python"
        )
    if model.spelling is None:
        raise MemtrainError(
            f"--hf: the task of {model.name} ({model.config.data.kind}) asks for answers, and a "
            "language model of transformers continues its input; memtrain.load_rnn opens its run "
            "in Python"
        )
    kind = model.config.cell.kind
    if type(model.cell) is not EXPORTED_CELLS.get(kind):
        raise MemtrainError(
            f"--hf: cell.kind={kind}: is not exported, because the folder holds the code of "
            f"built-in recurrent cells alone: {', '.join(EXPORTED_CELLS)}"
        )
    return model.spelling


def check_folder(path: Path) -> None:
    """Refuse a folder in which files of something else would be replaced, such as a run's.

    An earlier export is replaced.
    """
    if path.exists() and not path.is_dir():
        raise MemtrainError(f"--hf {path}: is a file; name a folder")
    try:
        found = parse_json(read_text(path / "config.json", MAX_CONFIG_BYTES), "config.json")
    except (OSError, MemtrainError):
        found = None
    if isinstance(found, dict) and found.get("model_type") == MemtrainConfig.model_type:
        return
    for name in FILES:
        if (path / name).exists():
            raise MemtrainError(
                f"--hf {path}: holds the {name} of something else, which would be replaced; name a "
                "new folder"
            )


def write_folder(model: Pretrained, codec: TokenCodec, path: Path, name: str) -> list[str]:
    """Write config, weights, tokenizer, code and model card; returns the names of the files.

    Args:
        model: which `check_exportable` has passed.
        codec: of the model.
        path: the folder; it is made if there is none.
        name: what the card loads the model by.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = export_tokenizer(codec) if codec.text else None
    with TemporaryDirectory() as folder, _quiet():
        draft = Path(folder)
        _language_model(model, codec, tokenizer).save_pretrained(draft)
        if tokenizer is not None:
            _fast_tokenizer(tokenizer).save_pretrained(draft)
        write_code(draft)
        (draft / "README.md").write_text(model_card(model, codec, name), encoding="utf-8")
        names = sorted(file.name for file in draft.iterdir())
        # A folder without config.json cannot be opened: it is written last.
        for file in sorted(names, key=lambda name: name == "config.json"):
            write_atomic(path / file, (draft / file).read_bytes())
    for file in set(FILES) - set(names):  # of an earlier export
        (path / file).unlink(missing_ok=True)
    return names


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off the progress bars of transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _language_model(
    model: Pretrained, codec: TokenCodec, tokenizer: ExportedTokenizer | None
) -> MemtrainForCausalLM:
    """The same weights in the class of transformers, with rows for the special tokens of a text."""
    readout = model.readout
    assert isinstance(readout, Decoder)
    cell = {key: value for key, value in asdict(model.config.cell).items() if key != "options"}
    sizes = {name: getattr(model.config.teacher, name) for name in READOUT_FIELDS}
    config = MemtrainConfig(
        vocab_size=tokenizer.vocab_size if tokenizer else codec.vocab_size,
        cell=cell,
        readout=sizes | {"causal": readout.causal},
        pad_token_id=tokenizer.padding if tokenizer else None,
        bos_token_id=tokenizer.start if tokenizer else codec.start_token,
        eos_token_id=tokenizer.end if tokenizer else None,
        dtype="float32",
    )
    config.readout["head_bias"] |= config.vocab_size > codec.vocab_size
    exported = MemtrainForCausalLM(config)
    added = config.vocab_size - codec.vocab_size
    exported.load_state_dict(add_tokens(model.state_dict(), added, codec.start_token))
    exported.generation_config = _generation_config(config, codec)
    return exported.eval()


def add_tokens(weights: dict[str, Tensor], count: int, start_token: int) -> dict[str, Tensor]:
    """Weights for `count` more tokens, which are read as the start token and never predicted."""
    if not count:
        return weights
    embedding, head = weights["cell.embedding.weight"], weights["readout.head.weight"]
    bias = weights.get("readout.head.bias", torch.zeros(len(head)))
    return weights | {
        "cell.embedding.weight": torch.cat([embedding, embedding[[start_token] * count]]),
        "readout.head.weight": F.pad(head, (0, 0, 0, count)),
        "readout.head.bias": F.pad(bias, (0, count), value=NEVER),
    }


def _generation_config(config: MemtrainConfig, codec: TokenCodec) -> GenerationConfig:
    """Special tokens; those that are never sampled; the length of an image."""
    limits: dict[str, Any] = {}
    if codec.writable < codec.vocab_size:
        limits["suppress_tokens"] = list(range(codec.writable, codec.vocab_size))
    if codec.picture is not None:
        limits["max_length"] = codec.picture.length + (not codec.start_written)
    return GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        **limits,
    )


def _fast_tokenizer(tokenizer: ExportedTokenizer) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.text),
        pad_token=PADDING,
        bos_token=START_OF_TEXT,
        eos_token=tokenizer.end_name,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
