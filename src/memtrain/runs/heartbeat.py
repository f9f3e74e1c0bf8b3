"""Heartbeats between a run's processes: one that hangs is named within a minute, and the run ends.

A collective waits half an hour for a stopped process, or one on a lost machine. So a thread of each
process writes a beat to torchrun's store once per second, with its progress; another judges the
beats of all. A silent process is frozen, and ends the run. A process that sends beats but keeps the
others waiting is slow: that is reported, and ends the run much later.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.distributed import Store

from memtrain.runs.processes import PARENT

TICK = 1.0
"""Seconds between two beats."""
FROZEN = 45.0
"""Seconds of silence during training after which the run ends."""
SLOW = 60.0
"""Seconds for which a process keeps the others waiting before that is reported."""
LOST = 600.0
"""Seconds after which a slow process ends the run, and silence outside of training, where a long
library call may hold Python's lock."""

OUTSIDE, TRAINING, GONE = range(3)
"""Phases of a process: before or after training; in it; ended by an exception, expected silence."""
STATUS = 2


class Beat(NamedTuple):
    """The state of a process."""

    count: int
    phase: int
    step: int
    exchanges: int
    host: str


class Watch:
    """Judges beats. It adds up the time between calls, so a machine that slept blames nobody."""

    def __init__(self, rank: int, size: int, *, main_keeps_store: bool) -> None:
        self.rank = rank
        self.main_keeps_store = main_keeps_store
        self.beats: list[Beat] | None = None
        self.silent = [0.0] * size
        self.late = [0.0] * size
        self.unanswered = 0.0
        """Seconds since the store answered."""
        self.idle = 0.0
        """Seconds since this process began an exchange: while it does, nobody hangs."""
        self.reported: set[int] = set()
        self._since = 0.0
        self._own = -1

    def judge(self, passed: float, beats: list[Beat] | None, own: int) -> str:
        """Judge the beats since the last call; returns why the run ends, or an empty string.

        Args:
            passed: seconds since the last call.
            beats: the last beat of each process; None if the store did not answer.
            own: how many exchanges this process has begun.
        """
        self.idle = self.idle + passed if own == self._own else 0.0
        self._own = own
        self.unanswered = self.unanswered + passed if beats is None else 0.0
        self._since += passed
        if beats is not None:
            self._compare(self._since, beats)
            self._since = 0.0
        return self._verdict()

    def _compare(self, passed: float, beats: list[Beat]) -> None:
        furthest = max(beat.exchanges for beat in beats)
        for rank, (old, new) in enumerate(zip(self.beats or beats, beats, strict=True)):
            self.silent[rank] = self.silent[rank] + passed if new.count == old.count else 0.0
            waited_for = new.exchanges == old.exchanges < furthest and new.phase != GONE
            self.late[rank] = self.late[rank] + passed if waited_for else 0.0
            if not self.late[rank]:
                self.reported.discard(rank)
        self.beats = beats

    def _verdict(self) -> str:
        for rank, beat in enumerate(self.beats or []):
            if rank != self.rank and self._frozen(rank, beat):
                return f"{_name(rank, beat)} has not answered for {self.silent[rank]:.0f} s"
        limit = FROZEN if self.main_keeps_store and self.rank else LOST
        if min(self.unanswered, self.idle) >= limit:
            who = "process 0" if self.main_keeps_store else "the launcher"
            return f"{who} has not answered for {self.unanswered:.0f} s"
        for rank, beat in enumerate(self.beats or []):
            if self.late[rank] >= LOST and beat.phase == TRAINING:
                return f"{_name(rank, beat)} has kept the others waiting for {LOST:.0f} s"
        return ""

    def _frozen(self, rank: int, beat: Beat) -> bool:
        limit = {OUTSIDE: LOST, TRAINING: FROZEN}.get(beat.phase, float("inf"))
        # While exchanges succeed nobody is frozen, even if beats are missing.
        return self.silent[rank] >= limit and self.idle >= limit / 3

    def slow(self) -> str:
        """A message about processes that keep the others waiting and were not reported yet."""
        found = []
        for rank, beat in enumerate(self.beats or []):
            if self.late[rank] >= SLOW and rank not in self.reported:
                self.reported.add(rank)
                found.append(
                    f"{_name(rank, beat)} keeps the others waiting, for {self.late[rank]:.0f} s "
                    f"now; after {LOST:.0f} s the run ends"
                )
        return "; ".join(found)

    def speaks(self) -> bool:
        """Whether this process is the first that answers: it prints for all."""
        lost = self.unanswered >= FROZEN / 3 and self.main_keeps_store
        mute = [silent >= FROZEN / 3 for silent in self.silent[: self.rank]]
        return all(silent or (lost and rank == 0) for rank, silent in enumerate(mute))


class Heartbeat:
    """The threads of one process: one exchanges beats, one judges them.

    Args:
        store: shared by all processes; this client of it is for the heartbeat alone.
        rank: this process.
        size: the number of processes.
        progress: returns the step this process is in, and how many exchanges it has begun.
    """

    def __init__(
        self, store: Store, rank: int, size: int, progress: Callable[[], tuple[int, int]]
    ) -> None:
        self.store, self.rank, self.progress = store, rank, progress
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.watch = Watch(rank, size, main_keeps_store=not agents)
        self.keys = [f"beat/{one}" for one in range(size)]
        self.phase, self.count = OUTSIDE, 0
        self.received: list[Beat] | None = None
        """The beats of all processes that were not judged yet."""
        self.saved: Callable[[], str] = lambda: "it was not training"
        self._soon, self._sent, self._over = (threading.Event() for _ in range(3))

    def announce(self) -> None:
        """Write a beat."""
        self.count += 1
        beat = Beat(self.count, self.phase, *self.progress(), socket.gethostname())
        self.store.set(self.keys[self.rank], json.dumps(beat))

    def start(self) -> None:
        for target in (self._exchange, self._judge):
            threading.Thread(target=target, daemon=True, name="heartbeat").start()

    @contextmanager
    def training(self, saved: Callable[[], str]) -> Iterator[None]:
        """Mark this process as training; `saved` describes what is on disk if the run ends."""
        self.saved, self.phase = saved, TRAINING
        try:
            yield
            self.phase = OUTSIDE
        except BaseException:
            self.phase = GONE
            raise
        finally:  # at once: this process may be about to end while another writes for long
            self._sent.clear()
            self._soon.set()
            self._sent.wait(2 * TICK)

    def close(self) -> None:
        """Send no more beats; all processes have left training."""
        self._over.set()
        self._soon.set()

    def _exchange(self) -> None:
        while not self._over.is_set() and os.getppid() == PARENT:  # else the store is gone
            try:
                self.announce()
                self.received = [Beat(*json.loads(b)) for b in self.store.multi_get(self.keys)]
                ended = self.store.check(["ended"])
            except RuntimeError:  # the store is gone, with the launcher or the main process
                return
            if ended:
                os._exit(STATUS)  # another process has printed why
            self._sent.set()
            self._soon.wait(TICK)
            self._soon.clear()

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK):
            now = time.monotonic()
            received, self.received = self.received, None
            reason = self.watch.judge(min(now - before, 2 * TICK), received, self.progress()[1])
            before = now
            if reason:
                self._end(reason)
            if (slow := self.watch.slow()) and self.watch.speaks():
                print(f"memtrain: {slow}", file=sys.stderr, flush=True)

    def _end(self, reason: str) -> None:
        """End all processes that still run; the launcher kills those that hang."""
        if self.watch.speaks():
            found: list[str] = []
            query = threading.Thread(target=lambda: found.append(self.saved()), daemon=True)
            query.start()
            query.join(30)  # a checkpoint may be being written
            saved = found[0] if found else "a checkpoint was being written"
            print(f"memtrain: {reason}; the run ends; {saved}", file=sys.stderr, flush=True)
            if self.watch.unanswered < FROZEN / 3:
                self.store.set("ended", reason)
                time.sleep(3 * TICK)  # in which the others read it
        else:
            time.sleep(40.0)  # the one that prints ends this process
        os._exit(STATUS)


def _name(rank: int, beat: Beat) -> str:
    where = f"step {beat.step}" if beat.step else "the start"
    return f"process {rank} ({beat.host}, last seen at {where})"
