"""The model card, README.md, of an exported network: what its run recorded, and how to use it."""

from pathlib import Path
from typing import Any

from memtrain import __version__
from memtrain.data.codec import TokenCodec
from memtrain.generation.pretrained import Pretrained
from memtrain.models.check_cell import memory_shape
from memtrain.models.teacher import count_parameters

FRONT = """\
---
library_name: transformers
{task}tags:
- memtrain
- recurrent-neural-network
- custom_code
---
"""
TEXT_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("{prompt}", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=200, do_sample=True)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```"""
TOKEN_EXAMPLE = """\
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokens = model.generate({length}do_sample=True)  # begins with token {start}
print(tokens.tolist())
```"""


def model_card(model: Pretrained, codec: TokenCodec, name: str) -> str:
    """The text of README.md.

    Args:
        model: the network, with its run's record.
        codec: of the model.
        name: what the example loads it by.
    """
    parts = [
        FRONT.format(task="pipeline_tag: text-generation\n" if codec.text else ""),
        f"# {model.name}\n",
        "A recurrent network that was trained with memtrain. It reads one token after another into "
        "a memory of fixed size: every token costs the same, however long the past.\n",
        _table(_facts(model, codec)),
        "## Use\n",
        _example(codec, name) + "\n",
        "The folder holds the code of the model, which needs torch and transformers 5. Where "
        "memtrain is installed, `import memtrain.deploy.hugging_face` replaces "
        "`trust_remote_code=True`.\n",
        _start(codec),
        "## Training\n",
        _training(model, codec),
    ]
    return "\n".join(parts)


def _facts(model: Pretrained, codec: TokenCodec) -> list[tuple[str, str]]:
    config = model.config
    tokens, width = memory_shape(model.cell)
    if codec.text:
        kind = "tokens of the tokenizer" if codec.tokenizer else "bytes"
    else:
        kind = "tokens of images" if codec.picture else "tokens"
    return [
        ("parameters", f"{count_parameters(model):,}: {config.cell.kind} cell and readout, fp32"),
        ("memory", f"{tokens} x {width} numbers"),
        ("vocabulary", f"{codec.vocab_size:,} {kind}"),
        ("data", Path(str(getattr(config.data, "path", ""))).name or config.data.kind),
        ("exported by", f"memtrain {__version__}"),
    ]


def _example(codec: TokenCodec, name: str) -> str:
    if codec.text:
        return TEXT_EXAMPLE.format(name=name, prompt="The")
    length = "" if codec.picture else "max_new_tokens=100, "
    return TOKEN_EXAMPLE.format(name=name, length=length, start=codec.start_token)


def _start(codec: TokenCodec) -> str:
    """How sequences begin."""
    if codec.text:
        return (
            "A prompt is read from the empty memory, and nothing is put before it; without one, "
            f"`<|startoftext|>` is read as token {codec.start_token}.\n"
        )
    if codec.classes:
        first, last = codec.writable, codec.vocab_size - 1
        names = ", ".join(codec.classes)
        return f"An image begins with the token of its class, {first}..{last}: {names}.\n"
    if codec.start_written:
        return f"A sequence begins with its first token, {codec.start_token} most often.\n"
    return f"A sequence begins with token {codec.start_token}, which is no part of it.\n"


def _training(model: Pretrained, codec: TokenCodec) -> str:
    """The stages and their lowest held-out losses, as the checkpoint records them."""
    rows = ["| stage | steps | tokens | seconds | lowest held-out loss |", "| --- " * 5 + "|"]
    for stage in model.trained.get("stages", ()):
        lowest = stage.get("lowest")
        loss = "not recorded" if lowest is None else f"{lowest:.4f} nats per {codec.unit}"
        rows.append(
            f"| {stage['name'].upper()} | {stage['steps']:,} | {stage['tokens']:,} | "
            f"{stage['seconds']:.1f} | {loss} |"
        )
    scores: dict[str, Any] = model.trained.get("scores", {})
    notes = [(key.replace("_", " "), str(value)) for key, value in scores.items()]
    return "\n".join(rows) + "\n" + ("\n" + _table(notes) if notes else "")


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines) + "\n"
