"""Memories that are kept between requests, by name; bounded in number and age."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from memtrain.deploy.server.errors import RequestError


@dataclass(slots=True)
class Session:
    """What a network has read in the calls of one name."""

    memory: Tensor | None = None
    """(M, D), after all tokens but the last; None before the first call has ended."""
    unread: int = 0
    """The last token, which the next call reads first."""
    tokens: int = 0
    """Read and written in all calls."""
    used: float = 0.0
    busy: bool = True


class Sessions:
    """The sessions of a server. Its methods may be called by any thread."""

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            most: how many there may be.
            seconds: after which a session that was not used is dropped.
            clock: the time in seconds.
        """
        self.most, self.seconds, self._clock = most, seconds, clock
        self._lock = threading.Lock()
        self._named: dict[str, Session] = {}

    def take(self, name: str) -> Session:
        """The session of a name, or a new one, for one call.

        Raises:
            RequestError: another call has it, or there are too many.
        """
        with self._lock:
            self._drop_old()
            found = self._named.get(name)
            if found is not None and found.busy:
                raise RequestError(
                    f"session={name!r}: another request continues it; wait for that to end",
                    status=409,
                    param="session",
                )
            if found is None and len(self._named) >= self.most:
                raise RequestError(
                    f"session={name!r}: there are {self.most} sessions already; end one with "
                    "DELETE /v1/sessions/NAME",
                    status=429,
                    param="session",
                )
            session = self._named.setdefault(name, Session())
            session.busy = True
            return session

    def keep(self, name: str, memory: Tensor, unread: int, tokens: int) -> None:
        """End a call that was completed."""
        with self._lock:
            session = self._named[name]
            session.memory, session.unread = memory, unread
            session.tokens += tokens
            session.used, session.busy = self._clock(), False

    def restore(self, name: str) -> None:
        """End a call that was not completed: the session is as before, a new one is gone."""
        with self._lock:
            session = self._named[name]
            session.busy = False
            if session.memory is None:
                del self._named[name]

    def drop(self, name: str) -> None:
        """Delete a session.

        Raises:
            RequestError: there is none, or a call has it.
        """
        with self._lock:
            self._drop_old()
            session = self._named.get(name)
            if session is None:
                raise RequestError(f"session={name!r}: there is none of that name", status=404)
            if session.busy:
                raise RequestError(f"session={name!r}: a request continues it", status=409)
            del self._named[name]

    def tokens(self) -> dict[str, int]:
        """The names, and the tokens of each."""
        with self._lock:
            self._drop_old()
            return {name: one.tokens for name, one in self._named.items()}

    def _drop_old(self) -> None:
        oldest = self._clock() - self.seconds
        for name, one in list(self._named.items()):
            if not one.busy and one.used < oldest:
                del self._named[name]
