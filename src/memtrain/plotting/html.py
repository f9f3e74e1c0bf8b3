"""One HTML page that needs nothing else: text, tables, charts and pictures in a single file.

The page asks nobody for anything, and its Content-Security-Policy makes the browser see to that.
It follows the reader's light or dark setting, a phone's width and a printer's paper.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.errors import MemtrainError
from memtrain.plotting.chart import SCRIPT, Chart, escape_text
from memtrain.plotting.html_style import STYLE

Cell = str | int | float | None
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUMBER = r"\d[\d.,]*(e[-+\u2212]?\d+)?"
NUMERIC = re.compile(
    rf"[-+\u2212~≈<>≤≥]? ?{_NUMBER}( ?± ?{_NUMBER})?( ?[^\s\d]{{1,3}})?|[-\u2013\u2014]?"
)
"""Text set flush right: a number, perhaps with a sign, an error and a unit; or a dash for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """Begins a section."""

    text: str
    """The section's title."""

    def html(self) -> str:
        return f"<h2>{escape_text(self.text)}</h2>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    """Plain text; markup in it is shown, not obeyed."""

    def html(self) -> str:
        return f"<p>{escape_text(self.text)}</p>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A paragraph that nobody should miss."""

    text: str
    """Plain text, as in `Text`."""

    def html(self) -> str:
        return f'<p class="notice">{escape_text(self.text)}</p>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a header; the first column names the row."""

    header: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[Cell]]
    """A cell for each column: text, or a number that is written here; None is a dash."""
    note: str = ""
    """A sentence under the table."""
    highlight: int | None = None
    """Which row stands out."""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise MemtrainError(
                    f"row {index} has {len(row)} cells: must have {len(self.header)}, one a column"
                )
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise MemtrainError(f"highlight={self.highlight}: the rows are 0..{len(self.rows) - 1}")

    def html(self) -> str:
        rows = [[_cell_text(cell) for cell in row] for row in self.rows]
        numeric = [
            column > 0 and all(_is_numeric(row[column]) for row in self.rows)
            for column in range(len(self.header))
        ]
        sides = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(
            f'<th scope="col"{side}>{escape_text(name)}</th>'
            for name, side in zip(self.header, sides, strict=True)
        )
        body = "".join(self._row_html(index, row, sides) for index, row in enumerate(rows))
        note = f'<p class="note">{escape_text(self.note)}</p>' if self.note else ""
        return (
            f'<div class="table"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>{note}</div>"
        )

    def _row_html(self, index: int, row: list[str], sides: list[str]) -> str:
        cells = [
            f'<td{side} data-label="{escape_text(name)}">{escape_text(cell)}</td>'
            for name, cell, side in zip(self.header, row, sides, strict=True)
        ]
        if row:
            cells[0] = f'<th scope="row">{escape_text(row[0])}</th>'
        mark = ' class="highlight"' if index == self.highlight else ""
        return f"<tr{mark}>{''.join(cells)}</tr>"


def _is_numeric(cell: Cell) -> bool:
    return not isinstance(cell, str) or NUMERIC.fullmatch(cell) is not None


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, str):
        return cell
    text = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", text).replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A picture, kept inside the page."""

    png_bytes: bytes
    """The picture as a PNG file has it."""
    caption: str
    """What it shows; also read out in place of the picture."""

    def __post_init__(self) -> None:
        if not self.png_bytes.startswith(PNG_SIGNATURE):
            raise MemtrainError(f"png_bytes={self.png_bytes[:8]!r}...: must be a PNG file's bytes")

    def html(self) -> str:
        source = "data:image/png;base64," + base64.b64encode(self.png_bytes).decode()
        caption = escape_text(self.caption)
        return (
            f'<figure class="picture"><img src="{source}" alt="{caption}">'
            f'<figcaption class="note">{caption}</figcaption></figure>'
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Charts or pictures side by side; one below the other where the page is narrow."""

    parts: Sequence[Chart | Figure]
    """From left to right."""

    def html(self) -> str:
        inner = [
            part.html(compact=True) if isinstance(part, Chart) else part.html()
            for part in self.parts
        ]
        return f'<div class="columns">{"".join(inner)}</div>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """Text as it stands, such as a config."""

    text: str
    """Spaces and line ends are kept."""

    def html(self) -> str:
        return f"<pre>{escape_text(self.text)}</pre>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Parts that are shown when the reader opens them."""

    summary: str
    """What is inside, always shown."""
    parts: Sequence["Part"]
    """From top to bottom."""

    def html(self) -> str:
        inner = "".join(part.html() for part in self.parts)
        return f"<details><summary>{escape_text(self.summary)}</summary>{inner}</details>"


Part = Heading | Text | Notice | Table | Chart | Figure | Columns | Code | Fold


def render_page(title: str, lead: str, parts: Sequence[Part], footer: str) -> str:
    """The whole page; write it as UTF-8.

    Args:
        title: headline, and name of the browser's tab.
        lead: what the page has to say, in a paragraph.
        parts: what follows, from top to bottom.
        footer: small print; line ends are kept.
    """
    body = "\n".join(part.html() for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape_text(title)}</h1>
<p class="lead">{escape_text(lead)}</p>
{body}
</main>
<footer>{escape_text(footer)}</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""
