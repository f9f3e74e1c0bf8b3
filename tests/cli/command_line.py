"""Helpers for tests that run commands."""

import re
from pathlib import Path

from memtrain.cli import main
from memtrain.config import RunConfig
from memtrain.config.serialize import to_json

PYTHON = re.compile(r"overwrite=True|allow_code=True|recipe\(|memtrain\.\w+\(|Run\.create")
"""Remedies for readers of Python, which an answer to a command must not name."""


def save(config: RunConfig, path: Path = Path("tiny.json")) -> str:
    path.write_text(to_json(config))
    return str(path)


def refused(capsys, *arguments: str) -> str:
    """Run a command that must fail; returns its one line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("memtrain: ")
    assert "Traceback" not in captured.err
    assert not PYTHON.search(captured.err), captured.err
    return captured.err
