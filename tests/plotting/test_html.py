import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from memtrain.errors import MemtrainError
from memtrain.plotting.chart import Chart, Series
from memtrain.plotting.html import POLICY, Columns, Figure, Heading, Table, Text, render_page

EVIL = "<script>alert('1')</script> & \"quoted\" <img src=x onerror=y>"
VOID = {"meta", "link", "img"}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


class Reader(HTMLParser):
    """Collects the tags of a page and checks that each one is closed where it should be."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def chart(**options):
    series = [
        Series(name="BPTT", x=[1, 10, 100], y=[0.1, None, 0.9]),
        Series(name="SMT → DMT", x=[1, 100], y=[0.2, 0.99], emphasised=True),
    ]
    return Chart(**{"title": "t", "x_label": "x", "y_label": "y", "series": series} | options)


def table(**options):
    rows = [["RNN by BPTT", 0.9284, 185_600], ["RNN after SMT → DMT", 0.991, 7_600]]
    return Table(**{"header": ["method", "accuracy", "operations"], "rows": rows} | options)


def page(*parts, title="Title", lead="Lead.", footer="Footer."):
    return render_page(title, lead, parts, footer)


def everything():
    return page(
        table(highlight=1, note="A note."),
        Heading(text="Section"),
        Text(text="Paragraph."),
        chart(note="Another note."),
        Columns(parts=[chart(log_x=True), Figure(png_bytes=PNG, caption="A picture.")]),
        chart(series=[]),
    )


def test_all_tags_are_balanced():
    tags = Reader(everything()).tags
    assert tags.count("figure") == 4
    assert tags.count("h1") == 1


def test_every_svg_is_xml():
    svgs = re.findall(r"<svg.*?</svg>", everything(), flags=re.DOTALL)
    assert len(svgs) >= 3
    for svg in svgs:
        ElementTree.fromstring(svg)


def test_the_page_loads_nothing_from_outside():
    markup = everything()
    without_pictures = re.sub(r"base64,[\w+/=]+", "", markup)
    assert "//" not in without_pictures
    assert "@import" not in markup and "url(" not in markup
    for name, value in Reader(markup).attributes:
        if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert value.startswith("data:")


def test_the_policy_forbids_external_loads_and_comes_before_anything_it_governs():
    markup = everything()
    assert "default-src 'none'" in POLICY and "img-src data:" in POLICY
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in markup
    assert markup.index(POLICY) < markup.index("<link") < markup.index("<style")


@pytest.mark.parametrize(
    "part",
    [
        Heading(text=EVIL),
        Text(text=EVIL),
        Table(header=[EVIL, EVIL], rows=[[EVIL, EVIL]], note=EVIL),
        chart(title=EVIL, x_label=EVIL, y_label=EVIL, note=EVIL),
        chart(series=[Series(name=EVIL, x=[0, 1], y=[0, 1])]),
        Columns(parts=[chart(title=EVIL)]),
        Figure(png_bytes=PNG, caption=EVIL),
    ],
    ids=["heading", "text", "table", "chart", "series", "columns", "figure"],
)
def test_markup_of_the_caller_is_shown_and_not_obeyed(part):
    reader = Reader(page(part, title=EVIL, lead=EVIL, footer=EVIL))
    assert reader.tags.count("script") == 1
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert reader.text.count(EVIL) >= 5


def test_control_characters_do_not_reach_the_page():
    markup = page(Text(text="a\x00b\x1bc\ud800d\u202ee"))
    assert "a\ufffdb\ufffdc\ufffdd\ufffde" in markup
    markup.encode("utf-8")


def test_numbers_in_a_table_are_written_for_people():
    cells = [1_228_800, 0.99123, 61.0, -3.25, 1e-05, None, "99.1 %"]
    markup = Table(header=["run", *"abcdefg"], rows=[["x", *cells]]).html()
    shown = re.findall(r"<td[^>]*>(.*?)</td>", markup)
    assert shown == ["1,228,800", "0.9912", "61", "−3.25", "1e−5", "–", "99.1 %"]


@pytest.mark.parametrize(
    "cell", [3, 0.5, None, "1.2k", "99.4 %", "−0.1", "0.91 ± 0.02", "3e-4", "–"]
)
def test_a_column_of_numbers_is_flush_right(cell):
    assert Table(header=["a", "b"], rows=[["x", cell]]).html().count('class="number"') == 2


@pytest.mark.parametrize("cell", ["diverged", "3 of 4 seeds", "GRU-2", "2026-05-04"])
def test_a_column_of_words_is_flush_left(cell):
    assert 'class="number"' not in Table(header=["a", "b"], rows=[["x", cell], ["y", 1]]).html()


def test_only_the_highlighted_row_stands_out():
    rows = re.findall(r"<tr[^>]*>", table(highlight=1).html())
    assert rows == ["<tr>", "<tr>", '<tr class="highlight">']


def test_cells_carry_the_name_of_their_column_for_narrow_pages():
    assert re.findall(r'data-label="(\w+)"', table().html()) == ["accuracy", "operations"] * 2


def test_a_picture_is_kept_inside_the_page():
    markup = Figure(png_bytes=PNG, caption="c").html()
    encoded = re.findall(r'src="data:image/png;base64,([^"]*)"', markup)[0]
    assert base64.b64decode(encoded) == PNG


def test_a_chart_is_legible_without_the_script():
    text = Reader(page(chart(title="Chart", x_label="seconds", y_label="Accuracy"))).text
    for word in ("Chart", "seconds", "Accuracy", "BPTT", "SMT → DMT", "0.8", "80"):
        assert word in text


def test_a_page_without_parts_has_title_lead_and_footer():
    text = Reader(page()).text
    assert text.split() == ["Title", "Title", "Lead.", "Footer."]


def test_the_same_parts_give_the_same_page():
    assert everything() == everything()


def test_a_row_of_another_length_than_the_header_is_refused():
    with pytest.raises(MemtrainError, match="row 0 has 1 cells: must have 2"):
        Table(header=["a", "b"], rows=[["x"]])


def test_a_highlight_outside_the_rows_is_refused():
    with pytest.raises(MemtrainError, match="highlight=2: the rows are 0..1"):
        table(highlight=2)


def test_bytes_that_are_no_png_are_refused():
    with pytest.raises(MemtrainError, match="must be a PNG"):
        Figure(png_bytes=b"GIF89a", caption="c")
