"""A request in progress, and the JSON of what it has written."""

import json
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memtrain.deploy.server.completion_request import CompletionRequest
from memtrain.deploy.server.errors import RequestError
from memtrain.deploy.server.row import Row
from memtrain.deploy.server.text import Piece


class Completion:
    """A request in progress: its rows, and what was written and not yet fetched."""

    def __init__(self, request: CompletionRequest, rows: Sequence[Row]) -> None:
        self.request, self.rows = request, rows
        self.pieces: deque[Piece] = deque()
        """Added by the worker, taken by who submitted it."""
        self.error: RequestError | None = None
        """Why it failed, or was ended."""
        self.cancelled = False
        self.left = len(rows)
        """Rows that are not complete."""
        self.name, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())

    @property
    def done(self) -> bool:
        """Whether nothing will be added."""
        return not self.left or self.error is not None

    def usage(self) -> dict[str, int]:
        """Tokens read and written so far."""
        prompts = sum(row.prompt_tokens for row in self.rows if row.index % self.request.n == 0)
        written = sum(len(row.written) for row in self.rows)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
        }

    def plain(self, model: str, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The body of a response, or of an event."""
        choices = [
            {
                "text": piece.text,
                "index": piece.index,
                "logprobs": _scores(piece) if self.request.logprobs is not None else None,
                "finish_reason": piece.finish,
            }
            for piece in pieces
        ]
        return {
            "id": self.name,
            "object": "text_completion",
            "created": self.created,
            "model": model,
            "choices": choices,
        }


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """One piece per choice, in the order of the choices."""
    found: dict[int, Piece] = {}
    for piece in pieces:
        whole = found.setdefault(piece.index, Piece(piece.index))
        whole.text += piece.text
        whole.scores += piece.scores
        whole.finish = piece.finish or whole.finish
    return [found[index] for index in sorted(found)]


def _scores(piece: Piece) -> dict[str, Any]:
    return {
        "tokens": [one.token for one in piece.scores],
        "token_logprobs": [one.logprob for one in piece.scores],
        "top_logprobs": [one.top for one in piece.scores],
        "text_offset": [one.offset for one in piece.scores],
    }


def event(plain: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(plain)}\n\n"
