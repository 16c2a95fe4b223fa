import pytest

from replicator import strategies
from replicator.strategies import Rule, Variable
from replicator.strategies.table import rows

RULES = [
    Rule(pattern="params/head/*"),
    Rule(pattern="params/table", synchronise="rows"),
    Rule(pattern="*", synchronise="hierarchical", compress="int8"),
]
MIXED = strategies.data_parallel(RULES, devices_per_host=2)


def variable(path):
    return Variable(path=path, shape=(256, 256), dtype="float32", follows=path)


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_rules_for_sums_are_read_back(form):
    write, read = (getattr(strategies, f"{way}_{form}") for way in ("to", "from"))
    assert read(write(MIXED)) == MIXED


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("params/head/kernel", 458752),
        ("params/table", 458752),  # dense: nobody knows its rows yet
        ("params/w", 262144 + 131072 + 2 * 3 * (8192 + 4 * 32)),
    ],
)
def test_the_table_forecasts_what_a_rule_sends(path, sent):
    [row] = rows(MIXED, [variable(path)], 8)
    assert row.wire_bytes == sent


def test_the_first_rule_that_matches_decides():
    found = [MIXED.method_of(f"params/{name}").compress for name in ("head/w", "w")]
    assert found == [None, "int8"]


def test_a_rule_of_its_defaults_does_nothing():
    rule = Rule(pattern="*")
    assert not rule.partitions
    assert not rule.synchronises
