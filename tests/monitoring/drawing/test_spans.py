"""Pictures of spans of time."""

import xml.etree.ElementTree as ET

from replicator.monitoring.drawing.spans import Span, spans_svg

SVG = "{http://www.w3.org/2000/svg}"


def span(row, begin_s, end_s, name="0"):
    return Span(row=row, begin_s=begin_s, end_s=end_s, name=name, kind="forward")


def test_bars_are_as_long_as_their_spans_and_in_their_rows():
    root = ET.fromstring(spans_svg([span("a", 5, 6), span("b", 6, 9)]))
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "span"]
    first, second = (each.attrib for each in bars)
    assert float(second["width"]) == 3 * float(first["width"])
    assert float(second["x"]) == float(first["x"]) + float(first["width"])
    assert float(second["y"]) > float(first["y"]) + float(first["height"])


def test_times_are_milliseconds_or_in_the_unit_that_is_given():
    spans = [span("a", 0, 2)]
    assert "0 to 2000 ms" in spans_svg(spans)
    assert "0 to 2 forwards" in spans_svg(spans, unit="forwards")


def test_a_picture_without_spans_is_one():
    assert ET.fromstring(spans_svg([])).tag == f"{SVG}svg"
