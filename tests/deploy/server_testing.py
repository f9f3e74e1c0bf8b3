"""A tiny model behind a worker, and what the tests of the server share."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memtrain.deploy.server.completion import Completion, merged
from memtrain.deploy.server.completion_request import CompletionRequest, Limits
from memtrain.deploy.server.sessions import Sessions
from memtrain.deploy.server.text import Piece
from memtrain.deploy.server.worker import Worker
from memtrain.generation.pretrained import Pretrained
from model_testing import decided_model

LIMITS = Limits(prompt_tokens=100, max_tokens=5000)
WAIT = 60.0
"""Seconds that a test waits for what must happen; longer only if it failed."""


def make_worker(
    made: Pretrained | None = None, *, rows: int = 8, queue: int = 100, sessions: int = 4
) -> Worker:
    made = made or decided_model()
    assert made.spelling is not None
    kept = Sessions(sessions, 60.0)
    return Worker(made, made.spelling, rows=rows, queue=queue, limits=LIMITS, sessions=kept)


class Client:
    """Submits requests to a worker and waits for them."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._news = threading.Condition()
        worker.start(self._notify)

    def _notify(self, completions: Sequence[Completion]) -> None:
        with self._news:
            self._news.notify_all()

    def submit(self, prompt: Any = "ab", **fields: Any) -> Completion:
        """Submit one prompt, a text or a tuple of tokens; or a list of several."""
        prompts = tuple(prompt) if isinstance(prompt, list) else (prompt,)
        return self.worker.submit(CompletionRequest(prompt=prompts, **fields))

    def pieces(self, completion: Completion) -> list[Piece]:
        """All choices of a completion; raises its error."""
        with self._news:
            assert self._news.wait_for(lambda: completion.done, WAIT)
        if completion.error is not None:
            raise completion.error
        return merged(completion.pieces)

    def text(self, prompt: Any = "ab", **fields: Any) -> str:
        (piece,) = self.pieces(self.submit(prompt, **fields))
        return piece.text


@contextmanager
def working(worker: Worker) -> Iterator[Client]:
    """A client of a worker, which ends with the context."""
    client = Client(worker)
    try:
        yield client
    finally:
        worker.stop()
