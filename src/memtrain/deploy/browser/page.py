"""Export a network as one HTML page that runs it: `memtrain export RUN --html FILE`."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from memtrain import __version__
from memtrain.data.codec import TokenCodec
from memtrain.deploy.browser.microscope import describe_memories, sample_memories
from memtrain.deploy.browser.vocabulary import describe_vocabulary
from memtrain.deploy.browser.weights import PackedNetwork, Precision, check_network, pack
from memtrain.files import write_output
from memtrain.generation.pretrained import Pretrained
from memtrain.models.check_cell import memory_shape
from memtrain.models.teacher import count_parameters
from memtrain.plotting.html import STYLE_SHEET, Table, escape_text

HOME = Path(__file__).parent
SCRIPTS = (
    "arithmetic",
    "network",
    "sampling",
    "vocabulary",
    "microscope",
    "page",
    "text",
    "picture",
    "start",
)
EXAMPLES = 6
"""Beginnings of images in a page, sampled from the model."""


@runtime_checkable
class PageOptions(Protocol):
    """The options of `memtrain export` that a page has."""

    html_weights: Precision


def write_html(model: Pretrained, path: Path, options: PageOptions) -> list[str]:
    """Write the page; returns lines that say what it holds and how exact it is.

    Raises:
        MemtrainError: the page cannot run the model, or would be too large.
    """
    check_network(model)
    packed = pack(model, options.html_weights)
    page, tokens = _render(model, packed)
    write_output(path, page)
    lines = [f"{path}: {len(page) / 1e6:,.1f} MB, {count_parameters(model):,} parameters"]
    if options.html_weights != "exact":
        lines.append(_rounding(model, packed, tokens))
    return lines


def _rounding(model: Pretrained, packed: PackedNetwork, tokens: Int[Tensor, "B T"]) -> str:
    """How much rounding the weights changes probabilities, over sequences of the rounded model."""
    tokens = tokens[:2, :64]
    with torch.no_grad():
        exact, rounded = model(tokens).softmax(dim=-1), packed.kept(tokens).softmax(dim=-1)
    difference = (exact - rounded).abs()
    return (
        f"rounded weights change a probability by {difference.amax(dim=-1).mean():.2g} on average, "
        f"at most {difference.max():.2g}, over {tokens.numel():,} sampled tokens"
    )


def _render(model: Pretrained, packed: PackedNetwork) -> tuple[bytes, Int[Tensor, "B T"]]:
    """The page, and the sequences that were sampled for it."""
    codec = model.spelling
    assert codec is not None
    tokens, memories = sample_memories(packed.kept, codec)
    described = {
        "network": packed.shape,
        "vocabulary": describe_vocabulary(codec),
        "memories": describe_memories(memories),
        "examples": _examples(codec, tokens),
    }
    data = json.dumps(described, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    weights = base64.b64encode(packed.weights).decode()
    script = "'use strict';\n" + "".join(_part(f"{name}.js") for name in SCRIPTS)
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{checksum}'"
    )
    title = escape_text(model.name)
    section = _part("picture.html" if codec.picture else "text.html")
    html = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{STYLE_SHEET.read_text()}{_part("page.css")}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{escape_text(_lead(model, codec))}</p>
<noscript><p class="notice">This page runs a network in JavaScript, which is turned off.</p>
</noscript>
{section}{_memory_section(model)}
<section class="facts" aria-label="About this network">
<h2>About this network</h2>
{_facts(model, packed).html()}
</section>
</main>
<footer>{escape_text(f"Written by memtrain {__version__}. Everything is computed in this page.")}
</footer>
<script type="application/json" id="model">{data}</script>
<script type="text/plain" id="weights">{weights}</script>
<script>{script}</script>
</body>
</html>
"""
    return html.encode(), tokens


def _part(name: str) -> str:
    return (HOME / name).read_text(encoding="utf-8")


def _examples(codec: TokenCodec, tokens: Int[Tensor, "B T"]) -> list[list[int]]:
    """The upper halves of sampled images, without the token of a class or of the start."""
    if codec.picture is None:
        return []
    plain = tokens if codec.start_written else tokens[:, 1:]
    return plain[:EXAMPLES, : codec.picture.length // 2].tolist()


def _lead(model: Pretrained, codec: TokenCodec) -> str:
    does = "draws images" if codec.picture else "writes text" if codec.text else "writes tokens"
    return (
        f"A recurrent network of {count_parameters(model):,} parameters that {does}. It runs in "
        "this page, on this device; nothing is sent anywhere."
    )


def _memory_section(model: Pretrained) -> str:
    count, width = memory_shape(model.cell)
    tokens = "one vector" if count == 1 else f"{count} vectors"
    about = (
        f"The memory is all that the network keeps of the past: {tokens} of {width} numbers, "
        f"{4 * count * width:,} bytes, as many after a thousand tokens as after one. After each "
        "token the network computes the next memory from it, and from that memory alone what "
        "comes next."
    )
    kind = model.config.cell.kind
    shown = min(count, 32)
    named = "layer" if kind == "gru" else "state" if kind == "lstm" else "memory token"
    note = f"The last 25 steps of each {named}, in the two directions in which it varies most."
    if shown < count:
        note += f" The first {shown} of {count} are shown."
    return _part("memory.html").format(
        about=escape_text(about),
        heading=f"Each {named}",
        tokens_note=escape_text(note),
        numbers_note=escape_text(
            f"A row per {named}. Blue is above zero, orange below; the page's colour is zero."
        ),
    )


def _facts(model: Pretrained, packed: PackedNetwork) -> Table:
    """Size, memory and training."""
    cell, readout = count_parameters(model.cell), count_parameters(model.readout)
    count, width = memory_shape(model.cell)
    bits = sorted({int(one["type"][1:]) for one in packed.shape["tensors"]}, reverse=True)
    rows: list[tuple[str, str]] = [
        ("Parameters", f"{cell + readout:,}: {cell:,} of the cell, {readout:,} of the readout"),
        ("Cell", model.config.cell.kind),
        (
            "Memory",
            f"{count} x {width} numbers, {4 * count * width:,} bytes",
        ),
        ("Vocabulary", f"{model.vocab_size:,} tokens"),
        ("Weights in this page", " and ".join(f"{one} bits" for one in bits)),
    ]
    rows += [(f"Training, {stage['name'].upper()}", _stage(stage)) for stage in _stages(model)]
    rows += [
        (_score_name(name), f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
        for name, value in dict(model.trained.get("scores") or {}).items()
        if isinstance(value, int | float)
    ]
    return Table(header=("", ""), rows=rows)


def _stages(model: Pretrained) -> list[dict[str, Any]]:
    return [stage for stage in model.trained.get("stages") or () if stage.get("steps")]


def _stage(stage: dict[str, Any]) -> str:
    tokens, seconds = stage.get("tokens", 0), stage.get("seconds", 0)
    return f"{stage['steps']:,} steps, {tokens:,} tokens, {seconds:,.0f} s"


def _score_name(name: str) -> str:
    """The name of a score as it is written: rnn_nats_a_patch is "RNN, nats a patch"."""
    words = name.replace("_", " ").replace("held out", "held-out")
    for model in ("teacher", "rnn"):
        if words.startswith(f"{model} "):
            named = "RNN" if model == "rnn" else model.capitalize()
            return f"{named}, {words.removeprefix(model).strip()}"
    return words.capitalize()
