import re
import xml.etree.ElementTree as ET

import pytest

from tests.monitoring.drawing.programs_to_draw import (
    HOSTILE,
    SHAPES,
    hostile,
    training,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.__name__)
def shape(request):
    return request.param


def test_it_is_xml_with_all_workers(shape):
    program = shape()
    root = ET.fromstring(program.to_svg())
    drawn = root.iter(f"{SVG}g")
    workers = [g for g in drawn if g.get("class") == "worker"]
    assert len(workers) == len(program.get_all_nodes())


def test_the_same_program_gives_the_same_text(shape):
    assert shape().to_svg() == shape().to_svg()
    assert shape().to_mermaid() == shape().to_mermaid()


def test_it_holds_no_script_no_style_and_no_link(shape):
    for element in ET.fromstring(shape().to_svg()).iter():
        assert element.tag.removeprefix(SVG) not in {"script", "style", "a", "image"}
        for name, value in element.attrib.items():
            assert not name.startswith("on"), name
            assert "href" not in name
            assert name != "style"
            assert not re.match(r"\s*(javascript|data|http)", value, re.IGNORECASE)


def test_names_are_text_whatever_is_in_them():
    root = ET.fromstring(hostile().to_svg())
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert any(HOSTILE in title for title in titles)
    assert HOSTILE in {text.text for text in root.iter(f"{SVG}text")}


def test_what_is_written_in_a_box_is_cut_and_told_whole_in_its_title():
    root = ET.fromstring(hostile().to_svg())
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert max(map(len, texts)) <= 34
    assert any("x" * 99 in title.text for title in root.iter(f"{SVG}title"))


def test_arrows_tell_which_argument_they_are():
    titles = [t.text for t in ET.fromstring(training().to_svg()).iter(f"{SVG}title")]
    assert "learner → replay: args[0]" in titles
    assert "actors → learner: 6 handles" in titles
