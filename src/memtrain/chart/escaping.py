"""Text that is not ours, made safe for a page."""

import re
from html import escape

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_text(text: str) -> str:
    """`text` as safe HTML, in an element or in a quoted attribute."""
    return escape(UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))
