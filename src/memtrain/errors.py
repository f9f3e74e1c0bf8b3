"""Errors for users: one line with the field, its value, the rule and the remedy."""

import operator
import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_MESSAGE = 800
"""Characters per message: it may quote a value of any length from a damaged file."""
MAX_NAMES = 48
"""Known names that an error about an unknown one lists."""


class MemtrainError(ValueError):
    """An error the user can fix.

    Attributes:
        command_line: the message with the remedy as a command or option, which the command line
            prints as one line.
    """

    def __init__(self, message: str, command_line: str = "") -> None:
        """
        Args:
            message: names the remedy, in Python if that is another than on the command line.
            command_line: then the whole message for the command line.
        """
        super().__init__(_shortened(printable(message)))
        self.command_line = _shortened(printable(command_line or message))


class CellContractError(MemtrainError):
    """A cell breaks a rule of the cell contract; the message names the rule."""


class DivergedError(MemtrainError):
    """A loss or a gradient is no longer finite."""


class DeviceMemoryError(MemtrainError):
    """A step needs more memory than the device has; the message names the option to change."""


class EndStage(Exception):
    """Raised by a callback to end the stage after this step, or after one more if this one was not
    evaluated. The next stage starts. Not an error."""


class FailedElsewhereError(MemtrainError):
    """The main process of several failed and printed why; the other processes end silently."""


class CheckpointError(MemtrainError):
    """A checkpoint that cannot be read."""


def printable(text: str) -> str:
    """Escape control characters (\\x1b), except line ends and tabs.

    Names in archives, values in untrusted files and generated text may hold sequences that rename,
    clear or reprogram the terminal, or reverse the direction of a line.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) if CONTROL.match(c) else c for c in text)


CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # control characters except tab and line end
    "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"  # line ends and directions of Unicode
    "\\ud800-\\udfff]"  # half characters: bytes of a file name that are not UTF-8
)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _shortened(message: str) -> str:
    """Cut the middle of a very long message: it begins with the field and ends with the rule."""
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE // 2]} [...] {message[-MAX_MESSAGE // 2 :]}"


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, Python's or numpy's, or below the least one."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise MemtrainError(f"{name}={value!r}: must be a whole number") from None
    if number < least:
        raise MemtrainError(f"{name}={value}: must be at least {least}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: a guess, if there is one, then all names; of very
    many, those that are most alike."""
    known = sorted(known)
    guess = get_close_matches(str(name), known, n=1, cutoff=0.6)
    if len(known) > MAX_NAMES:
        alike = get_close_matches(str(name), known, n=MAX_NAMES // 4, cutoff=0.0)
        ending = f"one of {len(known):,} names, such as {', '.join(alike)}"
    else:
        ending = f"one of {', '.join(known)}"
    return f"did you mean {guess[0]}? ({ending})" if guess else f"must be {ending}"


def describe_error(error: Exception) -> str:
    """An exception of the user's code in one line."""
    first = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {first}" if first else "")
