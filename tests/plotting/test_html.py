"""HTML pages: escaping, what may be loaded, tables and charts."""

import base64
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import MemtrainError
from memtrain.plotting.html import (
    POLICY,
    Chart,
    Code,
    Columns,
    Figure,
    Fold,
    Heading,
    Notice,
    Series,
    Table,
    Text,
    render_page,
)
from memtrain.plotting.style import COLOURS, SVG_COLOURS

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
        if self.open and self.open[-1] != "style":
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
    assert len(svgs) == 5  # a chart outside columns has one for wide and one for narrow screens
    for svg in svgs:
        assert ElementTree.fromstring(svg).get("viewBox")


def test_the_page_loads_nothing_from_outside():
    markup = everything()
    without_pictures = re.sub(r"base64,[\w+/=]+", "", markup)
    assert "//" not in without_pictures
    assert "@import" not in markup and "url(" not in markup
    for name, value in Reader(markup).attributes:
        if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert value.startswith(("data:", "#"))


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
        chart(marks={EVIL: 50}),
        Figure(png_bytes=PNG, caption=EVIL),
        Notice(text=EVIL),
        Code(text=EVIL),
        Fold(summary=EVIL, parts=[Text(text=EVIL)]),
    ],
    ids=lambda part: type(part).__name__,
)
def test_markup_in_arguments_is_escaped(part):
    reader = Reader(page(part, title=EVIL, lead=EVIL, footer=EVIL))
    assert "script" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert reader.text.count(EVIL) >= 5


def test_control_characters_do_not_reach_the_page():
    markup = page(Text(text="a\x00b\x1bc\ud800d\u202ee"))
    assert "a\ufffdb\ufffdc\ufffdd\ufffde" in markup
    markup.encode("utf-8")


def test_numbers_in_a_table_are_human_readable():
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


def test_an_image_is_embedded_in_the_page():
    markup = Figure(png_bytes=PNG, caption="c").html()
    encoded = re.findall(r'src="data:image/png;base64,([^"]*)"', markup)[0]
    assert base64.b64decode(encoded) == PNG


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


def test_bytes_that_are_not_a_png_are_refused():
    with pytest.raises(MemtrainError, match="must be a PNG"):
        Figure(png_bytes=b"GIF89a", caption="c")


# ---------------------------------------------------------------------------------------- charts


def line(x, y, **options):
    return Series(**{"name": "line", "x": x, "y": y} | options)


def plot(*series, **options) -> ElementTree.Element:
    """The SVG of a chart with these lines."""
    markup = chart(series=series, **options).html(compact=True)
    return ElementTree.fromstring(re.findall(r"<svg.*</svg>", markup)[0])


def drawn(svg: ElementTree.Element, colour: str, *, width: str) -> list[str]:
    """Paths of the lines with a colour and a width; the last one, in the legend, is left out."""
    style = f"stroke: {SVG_COLOURS[colour]}; stroke-width: {width}"
    paths = [path for path in svg.iter("path") if style in path.get("style", "")]
    return [path.attrib["d"] for path in paths[:-1]]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-.\de]+) ([-.\de]+)", path)]


def labels(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in svg.iter("text")]


def test_a_chart_has_a_line_per_series_its_labels_and_ticks():
    text = Reader(page(chart(title="Chart", x_label="seconds", y_label="Accuracy"))).text
    for word in ("Chart", "seconds", "Accuracy", "BPTT", "SMT → DMT", "0.8", "80"):
        assert word in text
    svg = plot(line([0, 4], [0, 1]), line([0, 9], [1, 0], muted=True))
    assert (
        len(drawn(svg, COLOURS[0], width="1.75")) == len(drawn(svg, COLOURS[6], width="1.25")) == 1
    )


def test_a_chart_names_hostile_series_as_text_and_refers_to_nothing():
    evil = '_"><script>$&\x00\ud800$'
    svg = plot(line([0, 1], [0, 1], name=evil), x_label=evil, y_label=evil, title=evil)
    shown = evil.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert labels(svg).count(shown) == 3
    assert not list(svg.iter("script"))
    for element in svg.iter():
        for name, value in element.attrib.items():
            assert "url(" not in value and "//" not in value
            assert name != "href" or value.startswith("#")


def test_charts_follow_the_colours_of_the_page():
    markup = everything()
    svgs = "".join(re.findall(r"<svg.*?</svg>", markup))
    assert not re.search("#[0-9a-f]{6}", svgs)
    for variable in set(re.findall(r"var\((--\w+)\)", svgs)):
        assert markup.count(f"{variable}: #") >= 1


def test_a_line_can_have_the_colour_of_another_chart():
    svg = plot(line([0, 1], [0, 1], colour=2), line([0, 1], [1, 0]))
    assert drawn(svg, COLOURS[2], width="1.75") and drawn(svg, COLOURS[1], width="1.75")


def test_emphasised_lines_have_the_accent_colour_and_muted_ones_are_grey():
    svg = plot(
        line([0, 1], [0, 1], muted=True, dashed=True),
        line([0, 1], [0, 0.5]),
        line([0, 1], [1, 0], emphasised=True),
    )
    assert drawn(svg, COLOURS[0], width="2.75") and drawn(svg, COLOURS[1], width="1.75")
    assert drawn(svg, COLOURS[6], width="1.25")
    dashes = [path for path in svg.iter("path") if "dasharray: 5,4" in path.get("style", "")]
    assert len(dashes) == 2  # on the plot and in the legend


@pytest.mark.parametrize(
    "gap",
    [None, math.nan, math.inf, -math.inf, pytest.param(10**400, id="huge")],
    ids=lambda gap: str(gap)[:5],
)
def test_a_point_without_a_value_is_a_gap(gap):
    svg = plot(line([0, 1, 2, 3, 4], [0, 1, gap, 1, 0]))
    (path,) = drawn(svg, COLOURS[0], width="1.75")
    assert path.count("M") == 2 and len(points(path)) == 4


def test_a_log_axis_leaves_out_zero_and_below():
    svg = plot(line([0, 1, 10, 100], [5, 6, 7, 8]), log_x=True)
    (path,) = drawn(svg, COLOURS[0], width="1.75")
    places = [x for x, _ in points(path)]
    assert len(places) == 3 and places[1] - places[0] == pytest.approx(
        places[2] - places[1], abs=0.1
    )
    assert {"1", "10", "100"} <= set(labels(svg))


def test_points_between_gaps_and_the_last_point_are_dots():
    assert len(list(plot(line([0, 1, 2, 3, 4], [1, None, 2, None, 3])).iter("use"))) == 3
    assert len(list(plot(line([5], [2])).iter("use"))) == 1
    assert len(list(plot(line([0, 1], [2, 3])).iter("use"))) == 1
    assert len(list(plot(line([0, 1], [2, 3], muted=True)).iter("use"))) == 0


@pytest.mark.parametrize("series", [[], [line([], [])], [line([1, 2], [None, math.nan])]])
def test_a_chart_without_points_shows_a_message(series):
    assert "No points to draw." in labels(plot(*series))


def test_a_fixed_y_range_is_kept():
    svg = plot(line([0, 1, 2], [-5, 0.5, 5]), y_range=(0, 1))
    assert {"0", "0.2", "0.8", "1"} <= set(labels(svg)) and "5" not in labels(svg)


@pytest.mark.parametrize(
    "highest, ticks",
    [(50_000, ["10k", "50k"]), (3_000_000, ["1M", "3M"]), (0.004, ["0.002", "0.004"])],
)
def test_tick_labels_are_short(highest, ticks):
    shown = labels(plot(line([0, 1], [0, highest])))
    assert set(ticks[:1]) <= set(shown) and all(len(text) <= 6 for text in shown)


def test_a_mark_is_drawn_where_it_is_and_omitted_outside_the_axis():
    marks = {"begins": 4, "late": 7, "beyond": 11}
    svg = plot(line([0, 10], [0, 1]), marks=marks)
    assert {"begins", "late"} <= set(labels(svg)) and "beyond" not in labels(svg)
    (path,) = drawn(svg, COLOURS[0], width="1.75")
    left, right = (x for x, _ in points(path))
    uprights = [path for path in svg.iter("path") if "dasharray: 2,3" in path.get("style", "")]
    assert [points(path.attrib["d"])[0][0] for path in uprights] == pytest.approx(
        [left + 0.4 * (right - left), left + 0.7 * (right - left)], abs=0.1
    )
    anchors = {text.text: text.attrib["style"] for text in svg.iter("text")}
    assert "end" in anchors["late"] and "end" not in anchors["begins"]
    log = plot(line([1, 10], [0, 1]), marks={"never": 0}, log_x=True)
    assert "never" not in labels(log)


ANY = st.one_of(st.none(), st.floats(), st.integers(-(10**6), 10**6))


@given(st.lists(st.lists(st.tuples(ANY, ANY), max_size=6), max_size=3), st.booleans())
@settings(deadline=None, max_examples=25)
def test_every_coordinate_lies_inside_the_view_box(lines, log_x):
    svg = plot(*(line([x for x, _ in one], [y for _, y in one]) for one in lines), log_x=log_x)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for path in svg.iter("path"):
        if "stroke: var(--c" in path.get("style", ""):
            places = points(path.get("d", ""))
            assert all(-5 <= x <= width and -5 <= y <= height for x, y in places)


def test_x_and_y_of_different_length_are_refused():
    with pytest.raises(MemtrainError, match="series 'line': 2 x and 1 y"):
        line([0, 1], [0])
