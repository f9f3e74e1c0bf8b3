"""Requests are read as they were meant, or refused with the field, its value and the rule."""

import json
from typing import Any

import pytest

from memtrain.deploy.server.completion_request import CompletionRequest, Limits, read_request
from memtrain.deploy.server.errors import RequestError

LIMITS = Limits(prompt_tokens=5, max_tokens=10, choices=4)


def read(**fields: Any) -> CompletionRequest:
    return read_request(json.dumps(fields).encode(), LIMITS)


def test_fields_are_read_and_null_is_the_default():
    assert read(prompt="a", seed=1) == CompletionRequest(prompt=("a",), seed=1)
    assert read(seed=1, prompt=None, n=None, stop=None) == CompletionRequest(seed=1)
    everything = {
        "model": "m",
        "prompt": [[1, 2], "b"],
        "max_tokens": 0,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "n": 2,
        "stop": ["x", "y"],
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 5,
        "echo": True,
    }
    found = read(**everything)
    assert found.prompt == ((1, 2), "b") and found.stop == ("x", "y") and found.stream_options
    rest = {k: v for k, v in everything.items() if k not in ("prompt", "stop", "stream_options")}
    assert {name: getattr(found, name) for name in rest} == rest
    assert read(session="a.b-1").session == "a.b-1" and read(stop="end").stop == ("end",)


def test_a_seed_is_drawn_unless_it_is_given():
    assert len({read().seed for _ in range(4)}) == 4


def test_fields_that_ask_for_nothing_are_accepted():
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "suffix": ""}
    assert read(seed=0, user="me", best_of=1, **nothing) == CompletionRequest()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON object"),
        (b"{", "JSON object"),
        (b"[1]", "a list: must be a JSON object"),
        (b"null", "null: must be"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"n": NaN}', "JSON object"),
        (b'{"n": 1, "n": 2}', "repeated"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "JSON object"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "JSON object"),
        (b'{"temperature": 1e999}', "temperature=inf"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": 1}', "unknown field"),
    ],
    ids=range(12),
)
def test_malformed_bodies_are_refused(body: bytes, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        read_request(body, LIMITS)
    assert caught.value.status == 400
    assert len(json.dumps(caught.value.plain()).encode()) < 1000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 1}, "did you mean max_tokens"),
        ({"max_tokens": -1}, "max_tokens=-1: must be a whole number, 0 to 10"),
        ({"max_tokens": 11}, "0 to 10"),
        ({"max_tokens": 10**30}, "0 to 10"),
        ({"max_tokens": 2.0}, "whole number"),
        ({"max_tokens": True}, "whole number"),
        ({"max_tokens": "4"}, "whole number"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": 1e-300}, "from 0.01 to 100"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": [1]}, "temperature="),
        ({"temperature": 10**400}, "temperature="),
        ({"top_p": 0}, "above 0"),
        ({"top_p": True}, "above 0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"n": 0}, "n=0"),
        ({"n": 5}, "1 to 4"),
        ({"n": 2, "prompt": ["a", "b", "c"]}, "6 choices"),
        ({"prompt": ["a"] * 5}, "5 prompts"),
        ({"prompt": []}, "must be a string"),
        ({"prompt": 3}, "must be a string"),
        ({"prompt": {"a": 1}}, "must be a string"),
        ({"prompt": [1, "a"]}, "must be a token"),
        ({"prompt": ["a", 1]}, "a number: must be a string"),
        ({"prompt": [[1, None]]}, "must be a token"),
        ({"prompt": [True]}, "must be a string"),
        ({"prompt": [1, 2, 3, 4, 5, 6]}, "6 tokens: at most 5"),
        ({"stop": [""]}, "1 to 100 characters"),
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"stop": 3}, "stop=3"),
        ({"stop": [3]}, "must be a string"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"stream": 1}, "true or false"),
        ({"stream_options": {"x": 1}}, "include_usage"),
        ({"stream_options": {"include_usage": 1}}, "true or false"),
        ({"logprobs": 6}, "0 to 5"),
        ({"echo": "yes"}, "true or false"),
        ({"session": ""}, "1 to 64"),
        ({"session": "../x"}, "1 to 64"),
        ({"session": "a", "n": 2}, "one prompt"),
        ({"model": 3}, "must be a string"),
        ({"frequency_penalty": 0.5}, "not supported"),
        ({"logit_bias": {"5": 1}}, "not supported"),
        ({"best_of": 3}, "not supported"),
        ({"suffix": "end"}, "not supported"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused_in_words(fields: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words) as caught:
        read(**fields)
    assert caught.value.status == 400 and caught.value.param


def test_errors_do_not_repeat_long_values_or_control_characters():
    with pytest.raises(RequestError) as caught:
        read(stop="\x1b[2J" + "x" * 10_000)
    assert len(str(caught.value)) < 200 and "\x1b" not in str(caught.value)
