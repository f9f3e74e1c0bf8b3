import html
import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import MemtrainError
from memtrain.plotting.chart import (
    BOX,
    LABEL_GAP,
    Chart,
    Mark,
    Series,
    end_places,
    line_classes,
    linear_axis,
    log_axis,
    tick_labels,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
ANY = st.one_of(st.none(), st.floats(), st.integers(-(10**6), 10**6))


def line(x, y, **options):
    return Series(**{"name": "line", "x": x, "y": y} | options)


def chart(*series, **options):
    return Chart(**{"title": "t", "x_label": "x", "y_label": "y", "series": series} | options)


def plot(markup):
    """The root element of the plot's SVG."""
    return ElementTree.fromstring(re.findall(r'class="plot".*?(<svg.*?</svg>)', markup)[0])


def paths(markup, kind):
    return [path.attrib["d"] for path in plot(markup) if kind in path.attrib["class"].split()]


def coordinates(markup):
    numbers = r"([-+.\de]+|nan|inf)"
    found = re.findall(f"[ML]{numbers},{numbers}", "".join(paths(markup, "line")))
    found += re.findall(f"M{numbers},{numbers}", "".join(paths(markup, "dot")))
    return [(float(x), float(y)) for x, y in found]


def is_round(number):
    digits = f"{abs(number):.14e}".split("e")[0].replace(".", "").rstrip("0")
    return len(digits) <= 3


def hover(markup):
    return json.loads(html.unescape(re.findall(r'data-chart="([^"]*)"', markup)[0]))


# ----------------------------------------------------------------------------------------- axes


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0, 61), (-3, 7), (0.002, 0.44), (0, 1_180_000), (1e-6, 3e-6), (80, 81)]
)
def test_linear_ticks_are_few_round_and_inside_the_range(low, high):
    axis = linear_axis([low, high])
    assert 3 <= len(axis.ticks) <= 8
    assert all(is_round(tick) for tick in axis.ticks)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in axis.ticks)


def test_ticks_are_exact_decimals():
    assert linear_axis([0, 0.7]).ticks == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_an_axis_that_begins_close_to_zero_begins_at_zero():
    assert linear_axis([0.3, 61]).low == 0
    assert linear_axis([30, 61]).low == 30


def test_a_whole_axis_begins_and_ends_on_a_tick():
    axis = linear_axis([0.13, 0.87], whole=True)
    assert (axis.low, axis.high) == (axis.ticks[0], axis.ticks[-1])
    assert axis.low <= 0.13 and axis.high >= 0.87


def test_a_fixed_range_is_kept_whatever_the_values():
    axis = linear_axis([-5, 5], fixed=(0, 1), whole=True)
    assert (axis.low, axis.high) == (0, 1)
    assert axis.labels == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_log_ticks_are_decades():
    assert log_axis([120, 190_000]).labels == ["1k", "10k", "100k"]


def test_log_ticks_of_a_short_range_are_finer_than_decades():
    assert log_axis([10, 60]).labels == ["10", "20", "50"]
    assert log_axis([300, 800]).labels == ["300", "400", "500", "600", "700", "800"]


def test_log_ticks_of_a_long_range_are_thinned():
    assert log_axis([1e-6, 1e8]).labels == ["0.0001", "0.1", "100", "100k", "100M"]


def test_places_on_a_log_axis_follow_the_exponent():
    axis = log_axis([1, 100])
    assert [axis.place(value) for value in (1, 10, 100)] == pytest.approx([0, 0.5, 1])


def test_a_whole_log_axis_covers_whole_decades():
    axis = log_axis([3e-4, 0.6], whole=True)
    assert (axis.low, axis.high) == (-4, 0)


@pytest.mark.parametrize(
    "ticks, step, labels",
    [
        ([0, 20_000, 40_000], 20_000, ["0", "20k", "40k"]),
        ([500, 1000, 1500], 500, ["500", "1k", "1.5k"]),
        ([800_000, 1_000_000, 1_200_000], 200_000, ["800k", "1M", "1.2M"]),
        ([2e9, 4e9], 2e9, ["2B", "4B"]),
        ([1001, 1002], 1, ["1,001", "1,002"]),
        ([0, 0.002, 0.004], 0.002, ["0", "0.002", "0.004"]),
        ([0.0001, 0.0002], 0.0001, ["0.0001", "0.0002"]),
        ([2e-5, 4e-5], 2e-5, ["2e−5", "4e−5"]),
        ([1.5e-7, 2e-7], 5e-8, ["1.5e−7", "2.0e−7"]),
        ([-0.5, 0.0, 0.5], 0.5, ["−0.5", "0", "0.5"]),
        ([1e15, 2e15], 1e15, ["1e15", "2e15"]),
    ],
    ids=lambda value: str(value) if isinstance(value, float | int) else "",
)
def test_tick_labels_are_short(ticks, step, labels):
    assert tick_labels(ticks, step) == labels


@given(st.lists(FINITE, max_size=5), st.booleans())
@settings(deadline=None)
def test_every_linear_axis_has_rising_distinct_ticks_inside_its_range(values, whole):
    axis = linear_axis(values, whole=whole)
    assert axis.low < axis.high
    assert len(axis.ticks) >= 2 and axis.ticks == sorted(set(axis.ticks))
    assert len(set(axis.labels)) == len(axis.labels) == len(axis.ticks)
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in [*values, *axis.ticks])


@given(st.lists(POSITIVE, max_size=5), st.booleans())
@settings(deadline=None)
def test_every_log_axis_has_ticks_inside_its_range(values, whole):
    axis = log_axis(values, whole=whole)
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 9
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in [*values, *axis.ticks])


# --------------------------------------------------------------------------------------- charts


@given(
    st.lists(st.lists(st.tuples(ANY, ANY), max_size=6), max_size=4), st.booleans(), st.booleans()
)
@settings(deadline=None)
def test_every_coordinate_lies_inside_the_view_box(lines, log_x, log_y):
    series = [line([x for x, _ in points], [y for _, y in points]) for points in lines]
    markup = chart(*series, log_x=log_x, log_y=log_y).html()
    assert plot(markup).get("viewBox") == f"0 0 {BOX} {BOX}"
    assert all(-0.05 <= number <= BOX + 0.05 for point in coordinates(markup) for number in point)


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_a_point_without_a_value_is_a_gap(gap):
    markup = chart(line([0, 1, 2, 3, 4], [0, 1, gap, 1, 0])).html()
    assert [path.count("M") for path in paths(markup, "line")] == [2]
    assert len(hover(markup)["lines"][0]["points"]) == 4


def test_a_log_axis_leaves_out_zero_and_below():
    markup = chart(line([0, 1, 10, 100], [5, 6, 7, 8]), log_x=True).html()
    assert hover(markup)["lines"][0]["points"] == [[1, 6], [10, 7], [100, 8]]


def test_one_point_is_a_dot_in_the_middle():
    markup = chart(line([100_000], [0.0002])).html()
    assert paths(markup, "line") == []
    assert coordinates(markup) == [(BOX / 2, pytest.approx(BOX / 2, abs=BOX / 5))]


def test_a_point_between_gaps_is_a_dot():
    markup = chart(line([0, 1, 2, 3, 4], [1, None, 2, None, 3])).html()
    assert paths(markup, "dot")[0].count("M") == 3


def test_a_constant_series_is_a_level_line():
    markup = chart(line([0, 1, 2], [0.9, 0.9, 0.9])).html()
    assert len({y for _, y in coordinates(markup)}) == 1


@pytest.mark.parametrize("series", [[], [line([], [])], [line([1, 2], [None, math.nan])]])
def test_a_chart_without_points_says_so(series):
    assert "No points to draw." in chart(*series).html()


def test_series_may_differ_in_length():
    markup = chart(line([0, 1, 2], [1, 2, 3]), line([0, 50], [2, 2])).html()
    assert [len(one["points"]) for one in hover(markup)["lines"]] == [3, 2]


def test_every_svg_is_xml_without_text_of_the_caller():
    evil = '"><script>&\x00\ud800'
    markup = chart(line([0, 1], [0, 1], name=evil), title=evil, x_label=evil, note=evil).html()
    for svg in re.findall(r"<svg.*?</svg>", markup):
        root = ElementTree.fromstring(svg)
        assert not "".join(root.itertext())
    assert "<script" not in markup
    markup.encode()


def test_hover_data_keeps_names_and_values():
    markup = chart(
        line([1_234_567, 2_000_000], [0.25, 0.123456789], name="a <b> → \"c\" & 'd'")
    ).html()
    only = hover(markup)["lines"][0]
    assert only["name"] == "a <b> → \"c\" & 'd'"
    assert only["points"] == [[1_234_567, 0.25], [2_000_000, 0.1234568]]


# --------------------------------------------------------------------------- colours and labels


def test_the_accent_colour_goes_to_the_emphasised_line_and_grey_to_the_muted_one():
    lines = [line([], [], muted=True, dashed=True), line([], []), line([], [], emphasised=True)]
    assert line_classes(lines) == ["grey dashed", "c1", "c0 strong"]


def test_a_lone_line_has_the_accent_colour():
    assert line_classes([line([], [])]) == ["c0"]


def test_a_wished_colour_is_kept_and_not_given_twice():
    assert line_classes([line([], []), line([], [], colour=0)]) == ["c1", "c0"]


def test_lines_beyond_the_palette_differ_from_those_before():
    classes = line_classes([line([], [])] * 12)
    assert len(set(classes)) == 12


def test_the_emphasised_line_is_drawn_last_and_the_muted_one_first():
    markup = chart(
        line([0, 1], [0, 1], emphasised=True),
        line([0, 1], [0, 1]),
        line([0, 1], [1, 1], muted=True),
    ).html()
    drawn = [path.attrib["class"] for path in plot(markup) if "line" in path.attrib["class"]]
    assert drawn == ["line grey", "line c1", "line c0 strong"]


def placed(*values):
    lines = [[(0.0, 0.0), (1.0, value)] for value in values]
    return dict(end_places(lines, linear_axis([0, 1]), linear_axis([], fixed=(0, 1))))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=14))
@settings(deadline=None)
def test_labels_at_line_ends_keep_their_distance_and_stay_at_the_plot(values):
    tops = sorted(placed(*values).values())
    assert len(tops) == len(values)
    assert tops[0] >= -1e-9 and tops[-1] <= 1 + 1e-9
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in zip(tops, tops[1:], strict=False))


def test_a_label_with_room_is_level_with_its_line():
    assert placed(0.25, 0.75) == {0: 0.75, 1: 0.25}


def test_the_legend_speaks_when_a_line_ends_early():
    early = [[(0.0, 0.0), (0.5, 0.5)], [(0.0, 0.0), (1.0, 1.0)]]
    axis = linear_axis([0, 1])
    assert end_places(early, axis, axis) == []


def test_the_legend_names_every_line_in_every_shape():
    both = [line([0, 1], [0, 1], name="first"), line([0, 1], [1, 0], name="second")]
    for markup in (chart(*both).html(), chart(*both).html(compact=True)):
        legend = re.findall(r'<div class="legend">(.*?)</div>', markup)[0]
        assert re.findall(r"</svg>(\w+)</span>", legend) == ["first", "second"]


# --------------------------------------------------------------------------------------- errors


def test_x_and_y_of_different_length_are_refused():
    with pytest.raises(MemtrainError, match="series 'line': 2 x and 1 y"):
        line([0, 1], [0])


def test_a_colour_outside_the_palette_is_refused():
    with pytest.raises(MemtrainError, match="colour=6: must be"):
        line([], [], colour=6)


@pytest.mark.parametrize("y_range", [(1, 0), (0, 0), (0.0, math.nan), (-math.inf, 0.0)])
def test_a_y_range_that_is_none_is_refused(y_range):
    with pytest.raises(MemtrainError, match="y_range="):
        chart(y_range=y_range)


@pytest.mark.parametrize("highest", [3e4, 988_722, 5e6, 4e8])
def test_ticks_of_a_log_axis_never_crowd(highest):
    """Two and a half decades once fell back to linear ticks, which overlap at the right end."""
    axis = log_axis([2_900, highest])
    places = [axis.place(tick) for tick in axis.ticks]
    gaps = [after - before for before, after in zip(places, places[1:], strict=False)]
    assert len(places) >= 3 and min(gaps) > 0.08


def test_a_mark_stands_where_it_is_named_and_nowhere_beyond_the_axis():
    line = Series(name="a", x=[0, 10], y=[0, 1])
    marks = [Mark(x=4, label="<b>begins"), Mark(x=7, label="late"), Mark(x=11, label="beyond")]
    html = chart_with(line, marks).html()
    assert html.count('class="upright"') == 2
    assert 'd="M400.0,0V1000"' in html
    assert '<span class="upright-label" style="left:40.00%">&lt;b&gt;begins</span>' in html
    assert '<span class="upright-label before" style="left:70.00%">late</span>' in html
    assert "beyond" not in html


def test_a_mark_that_a_log_axis_cannot_place_is_left_out():
    line = Series(name="a", x=[1, 10], y=[0, 1])
    html = chart_with(line, [Mark(x=0, label="never")], log_x=True).html()
    assert "never" not in html and 'class="upright"' not in html


def chart_with(line: Series, marks: list[Mark], **options) -> Chart:
    return Chart(title="t", x_label="x", y_label="y", series=[line], marks=marks, **options)
