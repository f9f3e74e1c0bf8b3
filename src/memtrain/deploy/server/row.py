"""One sequence of a request: the tokens that it reads, then those that it writes."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.data.codec import TokenCodec
from memtrain.deploy.server.completion_request import CompletionRequest
from memtrain.deploy.server.sessions import Session
from memtrain.deploy.server.text import ChoiceText, Piece, Score, score
from memtrain.models.sampler import Sampler

DRAWN = 16
"""Random numbers drawn at once, as `memtrain.generate` draws them."""


class Row:
    """A sequence, and what it needs to be computed apart from all others."""

    def __init__(
        self,
        codec: TokenCodec,
        request: CompletionRequest,
        prompt: list[int],
        index: int,
        device: torch.device,
        session: Session | None = None,
    ) -> None:
        """
        Args:
            codec: of the network.
            request: that it is a part of.
            prompt: its tokens; empty to start as the data begins, or to continue the session.
            index: of the choice.
            device: that draws its random numbers.
            session: the memory to continue.
        """
        seed = (request.seed + index) % 2**63
        self.index, self.request, self.codec = index, request, codec
        self.session = session
        self.memory = session.memory if session else None
        if self.memory is not None and session is not None:
            before, echoed = [session.unread], prompt
        else:
            before, echoed = beginning(codec, prompt, seed)
        self.reading = before + echoed
        self.written: list[int] = []
        self.finish = "" if request.max_tokens else "length"
        """Why it is complete, once it is."""
        self._read = 0
        # Without anything to write, the last token stays unread, as the last one written does.
        self._to_read = len(self.reading) - (not request.max_tokens)
        self._echoed_from = len(before)
        self.sampler = Sampler(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            allowed=codec.writable,
        )
        self._generator = torch.Generator(device).manual_seed(seed)
        self._uniforms: list[float] = []
        self._text = ChoiceText(codec, request.stop)
        self._echoed = 0
        """Characters of the prompt that are part of the text."""
        self.piece = Piece(index)
        """What is to be delivered."""
        if request.echo:
            self._echo(echoed, first=not before and self.memory is None)
        if self.complete:
            self.piece.finish = self.finish

    def _echo(self, prompt: list[int], first: bool) -> None:
        """Begin the text with the prompt. The very first token has no probability."""
        self.piece.text = self.codec.decode_text(np.array(prompt, np.int64)) if prompt else ""
        self._echoed = len(self.piece.text)
        if first and self.scored:
            self._note_score(prompt[0], None, 0)

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to compute."""
        return bool(self.finish) and self._read == self._to_read

    @property
    def input(self) -> int:
        """The token to read next."""
        return self.written[-1] if self.written else self.reading[self._read]

    @property
    def unread(self) -> int:
        """The last token of the complete sequence."""
        return self.written[-1] if self.written else self.reading[-1]

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given, without the one left by an earlier call of the session."""
        return len(self.reading) - (self.memory is not None)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities were asked for."""
        return self.request.logprobs is not None

    def note_read(self, logits: Float[Tensor, " V"] | None) -> bool:
        """Note that `input` was read; returns whether the row needs a token now.

        Args:
            logits: of the token after it, if the row is scored.
        """
        self._read += not self.written
        echoed = self.request.echo and self._echoed_from <= self._read < len(self.reading)
        if self.scored and echoed and not self.written:
            self._note_score(self.reading[self._read], logits, self._echoed_offset())
        if self.complete:
            self.piece.finish = self.finish
        return not self.finish and self._read == self._to_read

    def _echoed_offset(self) -> int:
        shown = np.array(self.reading[self._echoed_from : self._read], np.int64)
        return len(self.codec.decode_text(shown)) if len(shown) else 0

    def uniform(self) -> float:
        """The next random number; in [0, 1)."""
        if not self._uniforms:
            device = self._generator.device
            drawn = torch.rand(DRAWN, generator=self._generator, device=device)
            self._uniforms = drawn.tolist()[::-1]
        return self._uniforms.pop()

    def write(self, token: int, logits: Float[Tensor, " V"] | None) -> None:
        """Add a token that was sampled from logits."""
        if self.scored:
            self._note_score(token, logits, self._echoed + self._text.length)
        self.written.append(token)
        self.piece.text += self._text.add(token)
        if self._text.stopped:
            self.finish = "stop"
        elif len(self.written) == self.request.max_tokens:
            self.finish = "length"
            self.piece.text += self._text.finish()
            self.finish = "stop" if self._text.stopped else "length"
        if self.finish:
            self.piece.finish = self.finish

    def _note_score(self, token: int, logits: Float[Tensor, " V"] | None, offset: int) -> None:
        found: Score = score(self.codec, token, logits, self.request.logprobs or 0, offset)
        self.piece.scores.append(found)

    def take_piece(self) -> Piece | None:
        """What there is to deliver, if anything."""
        piece = self.piece
        if not (piece.text or piece.scores or piece.finish):
            return None
        self.piece = Piece(self.index)
        return piece


def beginning(codec: TokenCodec, prompt: list[int], seed: int) -> tuple[list[int], list[int]]:
    """The tokens that come before a prompt and are not part of it, and the prompt.

    Without a prompt a sequence starts as the data does.
    """
    if codec.start_written:
        return [], prompt or [codec.start_token]
    if not codec.classes:
        return [codec.start_token], prompt
    own, rest = codec.split_class(np.array(prompt, np.int64))
    number = codec.sample_classes(1, seed)[0] if own is None else own
    return [codec.writable + int(number)], rest.tolist()
