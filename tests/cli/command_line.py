"""Helpers for tests that run commands."""

from pathlib import Path

from memtrain.cli import main
from memtrain.config import RunConfig
from memtrain.config.serialize import to_json


def save(config: RunConfig, path: Path = Path("tiny.json")) -> str:
    path.write_text(to_json(config))
    return str(path)


def refused(capsys, *arguments: str) -> str:
    """Run a command that must fail; returns its one line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("memtrain: ")
    assert "Traceback" not in captured.err
    return captured.err
