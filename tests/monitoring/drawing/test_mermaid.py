import re

import replicator.launchpad_bridge as lp
from tests.monitoring.drawing.programs_to_draw import hostile, training


def test_groups_are_subgraphs_and_handles_are_arrows():
    assert training().to_mermaid() == (
        "flowchart LR\n"
        '  w0["replay<br/>Service"]\n'
        '  w1["learner<br/>Service"]\n'
        '  subgraph g2["actors"]\n'
        + "".join(f'    w{i + 2}["actors/{i}<br/>work"]\n' for i in range(6))
        + "  end\n"
        '  w8["evaluator<br/>work"]\n'
        '  w9["lonely<br/>work"]\n'
        "  w1 --> w0\n"
        "  g2 --> w0\n"
        "  g2 --> w1\n"
        "  w8 --> w1\n"
    )


def test_no_character_of_a_name_is_read_as_mermaid_or_html():
    for line in hostile().to_mermaid().splitlines()[1:4]:
        name, text = re.fullmatch(r'  (w\d+)\["(.*)"\]', line).groups()
        assert name
        assert not re.sub(r"#\d+;|<br/>|[\w .,/-]", "", text)


def test_a_program_without_nodes_is_an_empty_picture():
    program = lp.Program("empty")
    assert program.to_mermaid() == "flowchart LR\n"
    assert program.to_svg().startswith("<svg ")
