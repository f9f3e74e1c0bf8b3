"""The text of a choice as its tokens come: stop strings, and the log-probabilities of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from torch import Tensor

from memtrain.data.codec import TokenCodec


@dataclass(frozen=True, slots=True)
class Score:
    """A token and its log-probability."""

    token: str
    logprob: float | None
    """None for the first token of all, before which nothing was read."""
    top: dict[str, float] | None
    """The likeliest tokens in its place."""
    offset: int
    """Where it begins in the text of the choice."""


@dataclass(slots=True)
class Piece:
    """What was added to a choice."""

    index: int
    text: str = ""
    scores: list[Score] = field(default_factory=list)
    finish: str | None = None
    """"stop" or "length" with the last piece."""


class ChoiceText:
    """Decodes a choice's tokens; keeps back what may become a stop string."""

    def __init__(self, codec: TokenCodec, stops: Sequence[str]) -> None:
        self._codec, self._stops = codec, stops
        self._stream = codec.stream()
        self._held = ""
        self.length = 0
        """Characters so far, those that are kept back included."""
        self.stopped = False
        """Whether a stop string was found; the text ends before it."""

    def add(self, token: int) -> str:
        """The text that a token completes, without what is kept back."""
        return self._pass_on(self._stream.add(np.array([token])))

    def finish(self) -> str:
        """The rest."""
        text = self._pass_on(self._stream.finish())
        return text if self.stopped else text + self._take(len(self._held))

    def _pass_on(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        self.length += len(text)
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._take(min(found))
        return self._take(len(self._held) - self._possible())

    def _possible(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in sizes if self._begins_stop(self._held[-n:])), 0)

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def score(
    codec: TokenCodec, token: int, logits: Float[Tensor, " V"] | None, top: int, offset: int
) -> Score:
    """The log-probability of a token, and the `top` likeliest ones, at temperature 1."""
    name = token_text(codec, token)
    if logits is None:
        return Score(name, None, None, offset)
    logs = logits[: codec.writable].float().log_softmax(dim=-1)
    best = logs.topk(min(top, len(logs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    likeliest = {token_text(codec, one): value for one, value in pairs}
    return Score(name, float(logs[token]), likeliest, offset)


def token_text(codec: TokenCodec, token: int) -> str:
    """A token as text; bytes that are no whole character are escaped, as OpenAI's API does."""
    text = codec.decode_text(np.array([token]))
    if codec.text and not codec.tokenizer and token >= 128:
        return f"bytes:\\x{token:02x}"
    return text
