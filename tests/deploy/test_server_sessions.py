"""Sessions are bounded in number and age, and have one user at a time."""

import pytest
import torch

from memtrain.deploy.server.errors import RequestError
from memtrain.deploy.server.sessions import Sessions

MEMORY = torch.zeros(1, 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_is_kept_and_continued():
    sessions = Sessions(2, 10.0)
    assert sessions.take("a").memory is None
    sessions.keep("a", MEMORY, 5, 3)
    again = sessions.take("a")
    assert again.memory is MEMORY and again.unread == 5 and sessions.tokens() == {"a": 3}
    sessions.keep("a", MEMORY + 1, 6, 4)
    assert sessions.tokens() == {"a": 7}


def test_a_call_that_fails_leaves_the_session_as_it_was():
    sessions = Sessions(2, 10.0)
    sessions.take("a")
    sessions.restore("a")
    assert sessions.tokens() == {}
    sessions.take("a")
    sessions.keep("a", MEMORY, 5, 3)
    sessions.take("a")
    sessions.restore("a")
    assert sessions.take("a").unread == 5


def test_a_busy_session_is_refused_and_not_dropped():
    sessions = Sessions(2, 10.0)
    sessions.take("a")
    for call in (sessions.take, sessions.drop):
        with pytest.raises(RequestError) as caught:
            call("a")
        assert caught.value.status == 409


def test_there_are_at_most_so_many_until_one_is_dropped_or_too_old():
    clock = Clock()
    sessions = Sessions(2, 10.0, clock)
    for name in "ab":
        sessions.take(name)
        sessions.keep(name, MEMORY, 0, 1)
        clock.now += 4
    with pytest.raises(RequestError, match="2 sessions already") as caught:
        sessions.take("c")
    assert caught.value.status == 429
    sessions.drop("b")
    sessions.take("c")
    clock.now += 60  # the busy one stays
    assert sessions.tokens() == {"c": 0}
    with pytest.raises(RequestError, match="none of that name") as caught:
        sessions.drop("a")
    assert caught.value.status == 404
