"""Shards are inside pieces, chunks inside shards, and neither wastes bytes."""

import itertools
import math

import pytest

from replicator.checkpoint.pieces.grid import Box, cells, choose_grid, joined

MIB = 1 << 20
# shape, piece, bytes of an element
CASES = [
    ((4096, 1024), (1024, 1024), 4),
    ((50257, 768), (50257, 768), 4),
    ((50257, 768), (6283, 768), 4),  # padded to 50264
    ((12, 768, 3072), (12, 768, 3072), 4),
    ((3, 3, 512, 512), (3, 3, 512, 512), 2),
    ((2048, 2048), (512, 1024), 4),
    ((1000003,), (1000003,), 4),
    ((50000017,), (50000017,), 4),
    ((100000,), (12500,), 1),
    ((7, 100, 300), (1, 100, 300), 8),
]


@pytest.mark.parametrize(("shape", "piece", "itemsize"), CASES)
def test_no_shard_is_in_two_pieces_and_chunks_fill_shards(shape, piece, itemsize):
    grid = choose_grid(shape, piece, itemsize, shard_bytes=4 * MIB)
    for whole, part, shard, chunk in zip(
        shape, piece, grid.shard, grid.chunk, strict=True
    ):
        assert part == whole or part % shard == 0
        assert shard % chunk == 0
    assert math.prod(grid.shard) * itemsize <= 4.1 * MIB
    assert math.prod(grid.chunk) * itemsize <= 2.1 * MIB


@pytest.mark.parametrize(("shape", "piece", "itemsize"), CASES)
def test_what_is_stored_behind_the_end_is_below_two_percent(shape, piece, itemsize):
    grid = choose_grid(shape, piece, itemsize, shard_bytes=4 * MIB)
    counts = [
        -(-whole // chunk) for whole, chunk in zip(shape, grid.chunk, strict=True)
    ]
    assert math.prod(counts) * math.prod(grid.chunk) <= 1.02 * math.prod(shape)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_is_read_on_either_axis_without_what_others_need(axis):
    grid = choose_grid((2048, 2048), (512, 2048), 4, shard_bytes=4 * MIB)
    cut = tuple(2048 // 8 if each == axis else 2048 for each in (0, 1))
    assert all(size % chunk == 0 for size, chunk in zip(cut, grid.chunk, strict=True))


def test_a_piece_of_a_prime_number_is_one_shard():
    grid = choose_grid((4 * 10000019,), (10000019,), 1, shard_bytes=4 * MIB)
    assert grid.shard == grid.chunk == (10000019,)


def test_cells_cover_a_region_once():
    box = Box(start=(3, 1), shape=(6, 5))
    found = [
        place
        for _, cell in cells(box, (4, 2))
        for place in itertools.product(
            *(
                range(at, at + size)
                for at, size in zip(cell.start, cell.shape, strict=True)
            )
        )
    ]
    assert sorted(found) == sorted(itertools.product(range(3, 9), range(1, 6)))


def test_regions_are_joined_where_they_share_a_chunk_and_not_elsewhere():
    boxes = [Box(start=(at, 0), shape=(2, 4)) for at in (0, 2, 4, 6)]
    assert [box.shape for box in joined(boxes, (2, 4))] == [(2, 4)] * 4
    assert [box.shape for box in joined(boxes, (4, 4))] == [(4, 4)] * 2
    assert [box.shape for box in joined(boxes, (3, 4))] == [(2, 4), (6, 4)]
