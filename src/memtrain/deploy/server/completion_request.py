"""Read the JSON of a completion request; everything in it is bounded and checked."""

import math
import re
import reprlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from memtrain.deploy.server.errors import RequestError
from memtrain.errors import MemtrainError, did_you_mean
from memtrain.files import parse_json

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 100
MAX_LOGPROBS = 5
COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures above 0: with a lower one the logits would overflow."""
SESSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SEEDS = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a request may ask for."""

    body_bytes: int = 2**20
    prompt_tokens: int = 16_384
    """Of each prompt."""
    max_tokens: int = 4096
    """Of each choice."""
    choices: int = 64
    """Prompts times n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """The fields of a request that change its result."""

    model: str | None = None
    prompt: tuple[str | tuple[int, ...], ...] = ("",)
    """Texts or tokens; an empty one starts as the data begins, or continues the session."""
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    """Choices for each prompt; that number i has the seed `seed + i`."""
    stop: tuple[str, ...] = ()
    seed: int = 0
    stream: bool = False
    stream_options: bool = False
    """Whether the last event of a stream has the usage."""
    logprobs: int | None = None
    echo: bool = False
    session: str | None = None
    """The memory to continue from, which is kept afterwards."""


def read_request(body: bytes, limits: Limits) -> CompletionRequest:
    """The request in a body of JSON.

    Raises:
        RequestError: it is not JSON, or a field is unknown, of the wrong type or out of bounds.
    """
    try:
        plain = parse_json(body, "body", strict=True)
    except MemtrainError as error:
        raise RequestError(f"{error}; must be a JSON object in UTF-8") from None
    if not isinstance(plain, dict):
        raise RequestError(f'body: {_name(plain)}: must be a JSON object, as {{"prompt": ...}}')
    known = [*READERS, *NEUTRAL, *IGNORED]
    for name in plain:
        if name not in known:
            message = f"{reprlib.repr(name)}: unknown field; {did_you_mean(name, known)}"
            raise RequestError(message, param=name[:64])
    for name, neutral in NEUTRAL.items():
        if (value := plain.get(name)) is not None and value not in neutral:
            raise _refusal(name, value, "is not supported; leave it out")
    given = {name: value for name, value in plain.items() if value is not None}
    read = {name: READERS[name](name, given[name], limits) for name in READERS if name in given}
    read.setdefault("seed", secrets.randbelow(SEEDS))
    request = CompletionRequest(**read)
    if (count := len(request.prompt) * request.n) > limits.choices:
        raise _refusal(
            "n", request.n, f"{count} choices with the prompts, at most {limits.choices}"
        )
    if (best := given.get("best_of", request.n)) != request.n:
        raise _refusal("best_of", best, "is not supported unless it equals n; leave it out")
    if request.session is not None and count != 1:
        raise _refusal("session", request.session, "takes one prompt and n=1")
    return request


def _refusal(name: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"{name}={reprlib.repr(value)}: {rule}", param=name)


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _whole(least: int, most: Callable[[Limits], int]) -> Callable[[str, Any, Limits], int]:
    def read(name: str, value: Any, limits: Limits) -> int:
        if type(value) is not int or not least <= value <= most(limits):
            raise _refusal(name, value, f"must be a whole number, {least} to {most(limits)}")
        return value

    return read


def _fraction(name: str, value: Any, limits: Limits) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise _refusal(name, value, "must be a number above 0 and at most 1")
    return float(value)


def _temperature(name: str, value: Any, limits: Limits) -> float:
    right = type(value) in (int, float) and (value == 0 or COLDEST <= value <= HOTTEST)
    if not right or not math.isfinite(value):
        raise _refusal(name, value, f"must be 0, or a number from {COLDEST} to {HOTTEST:g}")
    return float(value)


def _flag(name: str, value: Any, limits: Limits) -> bool:
    if type(value) is not bool:
        raise _refusal(name, value, "must be true or false")
    return value


def _text(name: str, value: Any, limits: Limits) -> str:
    if not isinstance(value, str):
        raise _refusal(name, value, f"{_name(value)}: must be a string")
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise _refusal(name, value, "holds half of a character (a surrogate); leave it out")
    return value


def _session(name: str, value: Any, limits: Limits) -> str:
    if not SESSION_NAME.fullmatch(value := _text(name, value, limits)):
        raise _refusal(name, value, "must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return value


def _stops(name: str, value: Any, limits: Limits) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise _refusal(name, value, f"must be a string, or a list of at most {MAX_STOPS}")
    for one in stops:
        if not 0 < len(_text(name, one, limits)) <= MAX_STOP_CHARACTERS:
            raise _refusal(name, one, f"must have 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _stream_options(name: str, value: Any, limits: Limits) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"include_usage"}:
        raise _refusal(name, value, 'must be {"include_usage": true} or {"include_usage": false}')
    return _flag("stream_options.include_usage", value.get("include_usage", False), limits)


def _prompts(name: str, value: Any, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (_text(name, value, limits),)
    if not isinstance(value, list) or not value:
        raise _refusal(name, value, "must be a string, a list of strings, tokens, or lists of them")
    if type(value[0]) is int:
        return (_tokens(name, value, limits),)
    if len(value) > limits.choices:
        raise _refusal(name, value, f"{len(value)} prompts, at most {limits.choices}")
    return tuple(
        _tokens(name, one, limits) if isinstance(one, list) else _text(name, one, limits)
        for one in value
    )


def _tokens(name: str, value: list[Any], limits: Limits) -> tuple[int, ...]:
    if len(value) > limits.prompt_tokens:
        raise too_long(len(value), limits)
    for token in value:
        if type(token) is not int:
            raise _refusal(name, token, f"{_name(token)}: must be a token, a whole number")
    return tuple(value)


def too_long(count: int, limits: Limits) -> RequestError:
    """The error of a prompt that is too long."""
    rule = f"prompt: {count} tokens: at most {limits.prompt_tokens}"
    remedy = "send it in parts to a session, with max_tokens=0 but for the last"
    return RequestError(f"{rule}; {remedy}", param="prompt", code="context_length_exceeded")


READERS: dict[str, Callable[[str, Any, Limits], Any]] = {
    "model": _text,
    "prompt": _prompts,
    "max_tokens": _whole(0, lambda limits: limits.max_tokens),
    "temperature": _temperature,
    "top_p": _fraction,
    "top_k": _whole(0, lambda limits: 2**31),
    "n": _whole(1, lambda limits: limits.choices),
    "stop": _stops,
    "seed": _whole(0, lambda limits: SEEDS - 1),
    "stream": _flag,
    "stream_options": _stream_options,
    "logprobs": _whole(0, lambda limits: MAX_LOGPROBS),
    "echo": _flag,
    "session": _session,
}
"""How each field is read."""
assert {*READERS} == {field.name for field in fields(CompletionRequest)}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}
"""Fields of OpenAI's API that are not supported, with the values that ask for nothing."""
IGNORED = ("user", "best_of")
"""Fields that change nothing; best_of must equal n."""
