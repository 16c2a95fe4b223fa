import itertools

from benchmarks.strategy_matrix.cover import cover, pairs

IDEAS = {"letter": "abcd", "number": (1, 2, 3), "sign": "+-"}


def is_possible(row):
    return (row.get("letter"), row.get("number")) != ("a", 1)


def all_rows():
    every = itertools.product(*IDEAS.values())
    return [dict(zip(IDEAS, values, strict=True)) for values in every]


def held(rows):
    return {pair for row in rows for pair in pairs(row)}


def test_each_pair_that_is_possible_is_held_and_no_other():
    possible = [row for row in all_rows() if is_possible(row)]

    assert held(cover(IDEAS, is_possible)) == held(possible)


def test_a_cover_is_far_shorter_than_all_rows():
    assert len(cover(IDEAS, lambda row: True)) <= 14  # of 24; 12 is the least


def test_rows_that_are_there_are_not_chosen_again():
    begun = cover(IDEAS, is_possible)[:5]
    added = cover(IDEAS, is_possible, held=begun)

    assert held([*begun, *added]) == held(row for row in all_rows() if is_possible(row))
    assert not any(row in added for row in begun)


def test_a_pair_that_only_a_third_idea_forbids_is_left_out():
    def allowed(row):  # no row at all holds a and 2: it would need a sign
        return not (len(row) == 3 and (row["letter"], row["number"]) == ("a", 2))

    missing = held(all_rows()) - held(cover(IDEAS, allowed))
    assert missing == {frozenset({("letter", "a"), ("number", 2)})}
