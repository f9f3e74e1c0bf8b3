"""Errors meant for a person: one line that names the field, its value, the rule and the remedy."""

from collections.abc import Iterable
from difflib import get_close_matches


class MemtrainError(ValueError):
    """Something the user can mend. The command line prints its message as one line."""


class CellContractError(MemtrainError):
    """A cell that breaks one rule of the cell contract; the message says which."""


class DivergedError(MemtrainError):
    """A loss or a gradient stopped being finite."""


class DeviceMemoryError(MemtrainError):
    """A device has less memory than a step needs; the message says which knob to turn."""


class FailedElsewhereError(MemtrainError):
    """The main process of several failed. It says why; the others end without a word."""


class CheckpointError(MemtrainError):
    """A checkpoint that cannot be read."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The ending of an error about an unknown name: a guess if there is one, then all names."""
    known = sorted(known)
    guess = get_close_matches(name, known, n=1, cutoff=0.5)
    ending = f"one of {', '.join(known)}"
    return f"did you mean {guess[0]}? ({ending})" if guess else f"must be {ending}"
