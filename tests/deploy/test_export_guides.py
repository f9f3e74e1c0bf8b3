"""The guides of exported steps and memory files: every block in them runs as written, in order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.cli import main

GUIDES = Path(__file__).parents[2] / "docs/guides"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", "memory-files"])
def test_the_blocks_of_a_guide_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((GUIDES / f"{name}.md").read_text())
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    for kind, text in blocks:
        if kind == "python":
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            continue
        for line in text.splitlines():
            command, *arguments = shlex.split(line)
            assert command == "memtrain" and main(arguments) == 0, line


def test_the_digit_without_memtrain_is_a_picture():
    """The decoding that the guide writes out is that of the codec."""
    import numpy as np

    from memtrain.generation.pretrained import load_pretrained

    codec = load_pretrained("mnist-small").spelling
    assert codec is not None
    tokens = np.random.default_rng(0).integers(256, size=196)
    _, program, *_ = (text for _, text in BLOCK.findall((GUIDES / "onnx.md").read_text()))
    decoding = program[program.index("image = ") : program.index("for line in image")]
    found = dict(np=np, size=28, levels=4, patch=2, tokens=tokens)
    exec(decoding, found)
    grey = np.asarray(found["image"]) * 85
    assert np.array_equal(grey, codec.decode_images(tokens[None])[0])
