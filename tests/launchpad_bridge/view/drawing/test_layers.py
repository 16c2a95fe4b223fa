import itertools

import pytest

from replicator.launchpad_bridge.view.drawing.layers import place

SIZE = (10.0, 10.0)


def test_nothing_takes_no_room():
    placed = place([], [])
    assert (placed.width, placed.height) == (0, 0)


def test_links_go_from_left_to_right():
    placed = place([SIZE] * 4, [(3, 1), (1, 0), (3, 0), (2, 0)])
    assert placed.columns == [2, 1, 1, 0]


def test_a_circle_is_cut_where_it_is_entered():
    placed = place([SIZE] * 4, [(0, 1), (1, 2), (2, 0), (3, 0)])
    assert placed.columns == [1, 2, 3, 0]


@pytest.mark.parametrize("turned", [False, True])
def test_a_long_link_passes_the_columns_between(turned):
    long = (2, 0) if turned else (0, 2)
    placed = place([SIZE] * 3, [(0, 1), (1, 2), long])
    (start, end) = placed.passages[2]
    assert start[1] == end[1]
    assert (start[0] > end[0]) == turned
    middle = placed.corners[1][1]
    assert not middle <= start[1] <= middle + SIZE[1], "it runs through a box"


def test_two_rows_that_would_cross_do_not():
    placed = place([SIZE] * 4, [(0, 3), (1, 2)])
    tops = [y for _, y in placed.corners]
    assert (tops[0] < tops[1]) == (tops[3] < tops[2])


def test_boxes_of_any_size_keep_their_distance():
    sizes = [(5.0 + 7 * (i % 4), 4.0 + 9 * (i % 3)) for i in range(12)]
    placed = place(sizes, [(i, i % 3) for i in range(3, 12)])
    boxes = list(zip(placed.corners, sizes, placed.columns, strict=True))
    for (a, size_a, column_a), (b, size_b, column_b) in itertools.combinations(
        boxes, 2
    ):
        if column_a == column_b:
            (upper, height), (lower, _) = sorted([(a[1], size_a[1]), (b[1], size_b[1])])
            assert lower >= upper + height
