"""memtrain serve."""

import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from memtrain.cli.args import parse
from memtrain.errors import MemtrainError

KEY_VARIABLE = "MEMTRAIN_API_KEY"
MOST_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve the recurrent network of a run, or a pretrained model, over HTTP: OpenAI's completions
    (POST /v1/completions), batched over clients, with sessions that keep their memory between
    requests. Ctrl-C ends it. docs/guides/serve.md has examples."""

    run: tyro.conf.Positional[str]
    """The run folder, or the name of a pretrained model, such as mnist-small."""
    host: str = "127.0.0.1"
    """Address to listen at; the default is reached from this machine only."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    api_key: str = ""
    """Key that clients must send (default: MEMTRAIN_API_KEY of the environment, else none)."""
    rows: int = 64
    """Sequences computed at once."""
    queue: int = 256
    """Sequences that may wait; further requests are refused with status 429."""
    max_tokens: int = 4096
    """Most tokens that a request may ask for."""
    max_prompt: int = 16_384
    """Most tokens of a prompt."""
    sessions: int = 256
    """Most sessions at a time."""
    session_minutes: float = 60.0
    """Minutes after which an unused session is dropped."""
    device: str = "auto"
    """auto: a GPU if there is one; or cpu, cuda, cuda:1, ..."""
    best: bool = False
    """Use the checkpoint with the lowest held-out loss instead of the newest."""
    allow_code: bool = False
    """Import your own cell class that the run's config names."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise MemtrainError(f"port={self.port}: must be 0 to {2**16 - 1}")
        if not 1 <= self.rows <= MOST_ROWS:
            raise MemtrainError(f"rows={self.rows}: must be 1 to {MOST_ROWS}")
        for name in ("max_tokens", "max_prompt"):
            if not 1 <= getattr(self, name) <= 2**20:
                raise MemtrainError(f"{name}={getattr(self, name)}: must be 1 to {2**20}")
        for name in ("queue", "sessions", "session_minutes"):
            if not 0 <= getattr(self, name) <= 2**20:
                raise MemtrainError(f"{name}={getattr(self, name)}: must be 0 to {2**20}")


def serve(arguments: list[str]) -> int:
    """Serve a model until a signal."""
    from dataclasses import replace

    options = parse(Serve, arguments, "memtrain serve")
    options = replace(options, api_key=options.api_key or os.environ.get(KEY_VARIABLE, ""))

    from memtrain.accel.engine import pick_device
    from memtrain.deploy.server.serve import serve as run_server
    from memtrain.generation.pretrained import open_model
    from memtrain.training.console import make_reporter

    model = open_model(
        options.run,
        best=options.best,
        allow_code=options.allow_code,
        reporter=make_reporter(),
        device=pick_device(options.device),
    )
    run_server(model, Path(options.run).resolve().name, options)
    return 0
