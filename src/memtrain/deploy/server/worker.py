"""The thread that owns the network: rows join and leave its batch between two steps."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.data.codec import TokenCodec
from memtrain.deploy.server.batch import Batch
from memtrain.deploy.server.completion import Completion
from memtrain.deploy.server.completion_request import CompletionRequest, Limits, too_long
from memtrain.deploy.server.errors import RequestError
from memtrain.deploy.server.row import Row
from memtrain.deploy.server.sessions import Sessions
from memtrain.errors import MemtrainError, describe_error, printable
from memtrain.models.rnn import RNN


class Worker:
    """Computes completions. One thread advances all rows by one token per step.

    Its methods may be called by any thread.
    """

    def __init__(
        self,
        rnn: RNN,
        codec: TokenCodec,
        *,
        rows: int,
        queue: int,
        limits: Limits,
        sessions: Sessions,
    ) -> None:
        """
        Args:
            rnn: the network, in evaluation mode.
            codec: of its tokens.
            rows: sequences computed at once.
            queue: sequences that may wait for a row.
            limits: of requests.
            sessions: memories between requests.
        """
        self.rnn, self.codec, self.limits, self.sessions = rnn, codec, limits, sessions
        self.batch, self.queue = Batch(rnn, rows), queue
        self.device = rnn.readout.head.weight.device
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Completion, Row]] = deque()
        self._active: list[tuple[Completion, Row]] = []
        self._ending = ""
        self._notify: Callable[[list[Completion]], object] = lambda completions: None
        self._thread = threading.Thread(target=self._work, name="completions", daemon=True)

    # ------------------------------------------------------------------ called by the server

    def start(self, notify: Callable[[list[Completion]], object]) -> None:
        """Start the thread.

        Args:
            notify: called by it after a step, with the completions that have news.
        """
        self._notify = notify
        self._thread.start()

    def stop(self, reason: str = "the server is stopping") -> None:
        """End all completions with an error, and the thread."""
        with self._changed:
            self._ending = reason
            self._changed.notify()
        self._thread.join()

    def load(self) -> dict[str, int]:
        """Sequences in progress and waiting, and sessions."""
        with self._changed:
            active, waiting = len(self._active), len(self._waiting)
        return {"running": active, "waiting": waiting, "sessions": len(self.sessions.tokens())}

    def submit(self, request: CompletionRequest) -> Completion:
        """Begin to compute a request.

        Raises:
            RequestError: it cannot be computed, or too much is waiting.
        """
        prompts = [self._tokens(prompt) for prompt in request.prompt]
        name, taken = request.session, False
        session = self.sessions.take(name) if name is not None else None
        try:
            if session is not None and session.memory is not None:
                own, _ = self.codec.split_class(np.array(prompts[0], np.int64))
                if own is not None:
                    raise RequestError("prompt: a class can only begin a session", param="prompt")
            rows = [
                Row(self.codec, request, prompt, index * request.n + i, self.device, session)
                for index, prompt in enumerate(prompts)
                for i in range(request.n)
            ]
            if self.codec.picture is not None:
                for row in rows:
                    self._check_size(self.codec.picture.length, row)
            completion = Completion(request, rows)
            self._enter(completion)
            taken = True
        finally:
            if name is not None and not taken:
                self.sessions.restore(name)
        return completion

    def _enter(self, completion: Completion) -> None:
        with self._changed:
            if self._ending:
                raise RequestError(self._ending, status=503)
            free = self.batch.rows - len(self._active)
            if len(self._waiting) + len(completion.rows) > self.queue + free:
                raise RequestError(
                    f"{len(self._waiting)} sequences wait already, at most {self.queue}; try again "
                    "later",
                    status=429,
                )
            self._waiting += [(completion, row) for row in completion.rows]
            self._changed.notify()

    def _tokens(self, prompt: str | tuple[int, ...]) -> list[int]:
        """The tokens of a prompt, checked."""
        if isinstance(prompt, str):
            try:
                tokens = self.codec.encode_text(prompt).tolist() if prompt else []
            except MemtrainError as error:
                raise RequestError(str(error), param="prompt") from None
        else:
            tokens = list(prompt)
            _, plain = self.codec.split_class(_array(tokens))
            if wrong := [one for one in plain.tolist() if not 0 <= one < self.codec.writable]:
                rule = f"is not a token, must be 0..{self.codec.writable - 1}"
                raise RequestError(f"prompt: {wrong[0]} {rule}", param="prompt")
        if len(tokens) > self.limits.prompt_tokens:
            raise too_long(len(tokens), self.limits)
        return tokens

    def _check_size(self, length: int, row: Row) -> None:
        """Refuse to write beyond the end of an image."""
        before = row.session.tokens if row.session is not None else 0
        given = before + row.prompt_tokens - (not self.codec.start_written)
        if given + row.request.max_tokens > length:
            raise RequestError(
                f"max_tokens={row.request.max_tokens}: an image has {length} tokens, of which "
                f"{given} are given; at most {max(0, length - given)}",
                param="max_tokens",
            )

    def cancel(self, completion: Completion) -> None:
        """Free the rows of a completion that nobody waits for."""
        if not completion.done:
            with self._changed:
                completion.cancelled = True
                self._changed.notify()

    # --------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._active or self._ending):
                    self._changed.wait()
                if self._ending:
                    break
                self._drop_cancelled()
                self._admit()
            news = [completion for completion, row in self._active]
            try:
                if self._active:
                    self._step()
            except Exception as error:  # such as a lack of memory: the server goes on
                message = f"the network failed: {describe_error(error)}"
                print(f"memtrain: {printable(message)}", file=sys.stderr)
                self._fail_all(message, 500)
            self._deliver(news)
        news = [completion for completion, _ in [*self._active, *self._waiting]]
        self._fail_all(self._ending, 503)
        self._deliver(news)

    def _drop_cancelled(self) -> None:
        for place in reversed(range(len(self._active))):
            completion, row = self._active[place]
            if completion.cancelled or completion.error is not None:
                self._leave(place)
                self._restore(row)
        kept = deque[tuple[Completion, Row]]()
        for completion, row in self._waiting:
            if completion.cancelled or completion.error is not None:
                self._restore(row)
            else:
                kept.append((completion, row))
        self._waiting = kept

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.batch.rows:
            completion, row = self._waiting.popleft()
            self.batch.join(row.memory)
            self._active.append((completion, row))

    def _leave(self, place: int) -> Tensor:
        """Remove a row from the batch, in which the last one takes its place."""
        last = self._active.pop()
        if place < len(self._active):
            self._active[place] = last
        return self.batch.leave(place)

    def _restore(self, row: Row) -> None:
        if row.request.session is not None:
            self.sessions.restore(row.request.session)

    def _step(self) -> None:
        """Advance all rows by one token."""
        self._retire()  # rows that had nothing to compute
        rows = [row for _, row in self._active]
        if not rows:
            return
        logits = self.batch.step([row.input for row in rows])
        if bool(logits.isnan().any()):
            raise MemtrainError(
                "its logits are not finite; the weights are damaged or the training diverged, "
                "take an earlier checkpoint"
            )
        own = [logits[place] if row.scored else None for place, row in enumerate(rows)]
        writing = [place for place, row in enumerate(rows) if row.note_read(own[place])]
        for place, token in self._choose(rows, writing, logits).items():
            rows[place].write(token, own[place])
        self._retire()

    @torch.no_grad()
    def _choose(
        self, rows: Sequence[Row], writing: Sequence[int], logits: Float[Tensor, "B V"]
    ) -> dict[int, int]:
        """A token for each place in `writing`; rows that sample alike are sampled together."""
        chosen: dict[int, int] = {}
        # On a GPU the order of a cumulative sum depends on the number of rows: it is always the
        # same there.
        least = 0 if self.device.type == "cpu" else self.batch.rows
        ordered = sorted(writing, key=lambda place: hash(rows[place].sampler))
        for sampler, group in groupby(ordered, key=lambda place: rows[place].sampler):
            places = list(group)
            fill = max(0, least - len(places))
            drawn = [rows[place].uniform() for place in places] + [0.0] * fill
            picked = torch.tensor(places + places[:1] * fill, device=self.device)
            tokens = sampler(logits[picked], torch.tensor(drawn, device=self.device))
            chosen |= dict(zip(places, tokens.tolist(), strict=False))
        return chosen

    def _retire(self) -> None:
        """Take the news of all rows; complete ones leave."""
        for place in reversed(range(len(self._active))):
            completion, row = self._active[place]
            if (piece := row.take_piece()) is not None:
                completion.pieces.append(piece)
            if row.complete:
                memory = self._leave(place)
                if row.request.session is not None:
                    tokens = row.prompt_tokens + len(row.written)
                    self.sessions.keep(row.request.session, memory, row.unread, tokens)
                completion.left -= 1

    def _fail_all(self, message: str, status: int) -> None:
        """End everything with an error."""
        with self._changed:
            for completion, row in [*self._active, *self._waiting]:
                completion.error = RequestError(message, status=status)
                self._restore(row)
            self._active.clear()
            self._waiting.clear()
            self.batch.clear()

    def _deliver(self, completions: list[Completion]) -> None:
        unique = {id(one): one for one in completions}
        news = [one for one in unique.values() if one.done or (one.request.stream and one.pieces)]
        if news:
            self._notify(news)


def _array(tokens: Sequence[int]) -> np.ndarray:
    """Tokens as an array; numbers that do not fit in it are no tokens."""
    try:
        return np.array(tokens, np.int64)
    except OverflowError:
        raise RequestError("prompt: holds a number that is no token", param="prompt") from None
