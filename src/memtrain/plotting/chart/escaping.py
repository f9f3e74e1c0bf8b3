"""Text that is not ours, made safe for a page."""

import re
from html import escape

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, directions of writing and half characters."""


def escape_text(text: str) -> str:
    """`text` as safe HTML, in an element or in a quoted attribute."""
    return escape(UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))
