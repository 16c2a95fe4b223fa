"""Pictures of spans of time."""

import xml.etree.ElementTree as ET

from replicator.monitoring.drawing.spans import DrawnSpan, spans_svg

SVG = "{http://www.w3.org/2000/svg}"


def span(row, start, end, label="0"):
    return DrawnSpan(
        row=row, start=start, end=end, label=label, title="a < b", kind="forward"
    )


def test_boxes_are_as_long_as_their_spans_and_in_their_rows():
    root = ET.fromstring(spans_svg([span("a", 5, 6), span("b", 6, 9)], title="two"))
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "span"]
    first, second = (next(g.iter(f"{SVG}rect")).attrib for g in groups)
    assert float(second["width"]) == 3 * float(first["width"])
    assert float(second["x"]) == float(first["x"]) + float(first["width"])
    assert float(second["y"]) > float(first["y"]) + float(first["height"])


def test_a_label_that_does_not_fit_is_left_out():
    long = span("a", 0, 1, label="a label that is long")
    assert "a label that is long" not in spans_svg([long, span("a", 1, 900)], title="")


def test_a_picture_without_spans_is_one():
    assert ET.fromstring(spans_svg([], title="none")).tag == f"{SVG}svg"
