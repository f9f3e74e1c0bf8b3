"""Reading text that may be anything: no more of it than a right file could have."""

import json
from pathlib import Path
from typing import Any

from memtrain.errors import MemtrainError


def read_text(path: Path, limit: int) -> str:
    """A file of UTF-8 of at most `limit` bytes.

    Raises:
        MemtrainError: it is larger, which is seen before it is read, or no UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise MemtrainError(
            f"{path.name}: larger than {limit:,} bytes, which memtrain never writes"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MemtrainError(f"{path.name}: no text ({error})") from None


def parse_json(text: str, what: str) -> Any:
    """JSON without numbers of endless length or brackets of endless depth.

    Raises:
        MemtrainError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MemtrainError(f"{what}: {error}") from None
