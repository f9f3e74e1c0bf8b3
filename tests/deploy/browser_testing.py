"""Tiny models, the page's scripts run by node, and pages opened in chromium."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import TINY
from memtrain.config import CellConfig, TeacherConfig
from memtrain.data.codec import TokenCodec
from memtrain.deploy.browser import page
from memtrain.generation.pretrained import Pretrained
from memtrain.models.build import build_rnn

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not on the PATH")
BYTES = TokenCodec(vocab_size=256, start_token=10, text=True, alphabet=tuple(range(10, 128)))


def perturbed_model(
    kind: str = "gru",
    codec: TokenCodec = BYTES,
    *,
    teacher: dict[str, Any] | None = None,
    readout_attention: Any = "causal",
    **cell: Any,
) -> Pretrained:
    """A network with random weights; `cell` and `teacher` change the sizes."""
    sizes: dict[str, Any] = dict(memory_tokens=2, memory_dim=16, width=24, layers=2)
    sizes |= dict(heads=3, head_dim=8) | cell
    readout: dict[str, Any] = dict(width=16, decoder_layers=2, heads=2, head_dim=8)
    config = replace(
        TINY,
        cell=CellConfig(kind=kind, **sizes),
        teacher=TeacherConfig(context_length=6, encoder_layers=1, **readout | (teacher or {})),
        readout_attention=readout_attention,
        smt=replace(TINY.smt, steps=0),  # attention is trained by BPTT alone
        dmt=replace(TINY.dmt, steps=0),
    )
    rnn = build_rnn(config, codec.vocab_size)
    with torch.no_grad():  # far from what an initialization would hide, such as biases of 0
        for parameter in rnn.parameters():
            parameter.add_(
                0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            )
    return Pretrained("tiny <model>", rnn, codec, config, {}).eval()


def page_of(model: Pretrained, folder: Path, weights: str = "exact") -> Path:
    """The model's page, written as the command does."""
    path = folder / "page.html"
    page.write_html(model, path, SimpleNamespace(html_weights=weights))  # type: ignore[arg-type]
    return path


def run_node(code: str, given: Any) -> Any:
    """The result of code after the page's scripts that need no browser; `given` is its input."""
    assert NODE is not None
    scripts = [
        (page.HOME / f"{name}.js").read_text()
        for name in ("arithmetic", "network", "sampling", "vocabulary")
    ]
    body = f"const given = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n{code}"
    done = subprocess.run(
        [NODE, "-e", "\n".join(["'use strict';", *scripts, body])],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def packed_json(packed: Any) -> dict[str, Any]:
    return {"shape": packed.shape, "weights": base64.b64encode(packed.weights).decode()}


def random_tokens_of(model: Pretrained, rows: int = 1, length: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(model.vocab_size, (rows, length), generator=generator)


@dataclass
class Opened:
    """A page in chromium, and what it reported."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1200, touch: bool = False) -> Iterator[Opened]:
    """Open a file, with motion reduced, so that nothing starts by itself. At the end nothing was
    requested but the file, and the console is empty."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, reduced_motion="reduce", has_touch=touch
    )
    shown = Opened(context.new_page())
    shown.page.on("console", lambda message: shown.complaints.append(message.text))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("request", lambda request: shown.requests.append(request.url))
    try:
        shown.page.goto(path.resolve().as_uri())
        yield shown
    finally:
        context.close()
    assert shown.complaints == []
    assert shown.requests == [path.resolve().as_uri()]
