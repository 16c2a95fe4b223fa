import itertools

from replicator.monitoring.drawing.layers import place

SIZE = (10.0, 10.0)


def columns_of(corners):
    """Return which column each box stands in."""
    lefts = sorted({x for x, _ in corners})
    return [lefts.index(x) for x, _ in corners]


def test_nothing_takes_no_room():
    assert place([], []) == []


def test_links_go_from_left_to_right():
    corners = place([SIZE] * 4, [(3, 1), (1, 0), (3, 0), (2, 0)])
    assert columns_of(corners) == [2, 1, 1, 0]


def test_a_circle_is_cut_where_it_is_entered():
    corners = place([SIZE] * 4, [(0, 1), (1, 2), (2, 0), (3, 0)])
    assert columns_of(corners) == [1, 2, 3, 0]


def test_two_rows_that_would_cross_do_not():
    tops = [y for _, y in place([SIZE] * 4, [(0, 3), (1, 2)])]
    assert (tops[0] < tops[1]) == (tops[3] < tops[2])


def test_boxes_of_any_size_keep_their_distance():
    sizes = [(5.0 + 7 * (i % 4), 4.0 + 9 * (i % 3)) for i in range(12)]
    boxes = zip(place(sizes, [(i, i % 3) for i in range(3, 12)]), sizes, strict=True)
    for ((x, y), (w, h)), ((a, b), (c, d)) in itertools.combinations(boxes, 2):
        assert a >= x + w or x >= a + c or b >= y + h + 18 or y >= b + d + 18
