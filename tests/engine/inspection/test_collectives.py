"""The collectives of programs that were compiled here, and of text from elsewhere."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from replicator.base.mesh import partition_mesh
from replicator.engine.inspection.collectives import collectives_of
from replicator.engine.inspection.device_groups import device_groups, mesh_axes
from replicator.engine.inspection.hlo_text import Instruction

SIZES = {"replica": 2, "shard": 2, "model": 2}
SUBSETS = [axes for count in (1, 2, 3) for axes in itertools.combinations(SIZES, count)]


def compiled_text(fn, *shape, sizes=SIZES):
    """Compile what each device does with its own rows."""
    mesh = partition_mesh(sizes, jax.devices())
    spec = PartitionSpec(tuple(sizes))
    program = jax.shard_map(
        fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(program).lower(jnp.ones(shape)).compile().as_text()


def collectives(fn, *shape, sizes=SIZES):
    return collectives_of(compiled_text(fn, *shape, sizes=sizes), sizes)


@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
def test_a_collective_lies_along_the_axes_that_the_user_named(axes):
    [found] = collectives(lambda x: lax.psum(x, axes), 8, 4)

    assert (found.kind, found.axes, found.devices) == (
        "all-reduce",
        axes,
        2 ** len(axes),
    )


def test_a_permutation_lies_along_the_axis_that_it_moves_over():
    ring = [(0, 1), (1, 0)]
    [found] = collectives(lambda x: lax.ppermute(x, ("shard",), ring), 8, 4)

    assert (found.kind, found.axes, found.wire_bytes) == (
        *("collective-permute", ("shard",)),
        16,
    )


def test_half_of_an_axis_lies_along_it():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    [found] = collectives(
        lambda x: lax.psum(x, "replica", axis_index_groups=groups),
        *(8, 4),
        sizes={"replica": 8},
    )

    assert (found.axes, found.devices) == (("replica",), 4)


def test_arrays_that_share_a_collective_are_one_with_the_bytes_of_all():
    def both(x):
        large, small = lax.psum((x, x[0]), "shard")
        return large * small[None]

    [found] = collectives(both, 16, 4)

    assert found.count == 1
    assert set(found.arrays) == {"f32[2,4]", "f32[4]"}
    assert found.wire_bytes == 32 + 16


def test_a_gather_tells_the_array_that_it_puts_together():
    [found] = collectives(
        lambda x: lax.all_gather(x, "model", axis=1, tiled=True), 8, 4
    )

    assert found.arrays == ("f32[1,8]",)


def test_a_cpu_sends_half_precision_as_single():
    [found] = collectives(lambda x: lax.psum(x.astype(jnp.bfloat16), "shard"), 8, 4)

    assert found.arrays == ("f32[1,4]",)


def test_loops_multiply():
    def turn(x, _):
        inner = lax.fori_loop(0, 3, lambda _, c: lax.psum(jnp.tanh(c), "shard"), x)
        return inner, None

    [found] = collectives(lambda x: lax.scan(turn, x, length=5)[0], 8, 4)

    assert (found.count, found.is_counted) == (15, True)
    assert found.wire_bytes == 15 * 16


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def grow(x):
        return lax.while_loop(lambda c: c[0, 0] < 9, lambda c: lax.psum(c, "shard"), x)

    [found] = collectives(grow, 8, 4)

    assert (found.count, found.is_counted) == (1, False)


def test_both_ways_of_a_conditional_count():
    def choose(x):
        return lax.cond(
            x[0, 0] > 0, lambda: lax.psum(x, "shard"), lambda: lax.psum(x, "model")
        )

    assert {each.axes for each in collectives(choose, 8, 4)} == {("shard",), ("model",)}


# As the TPU compiler of libtpu 0.0.42 writes a scan, shortened.
UNNOTED = """HloModule jit_step, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %copy.5 = s32[]{:T(128)S(6)} copy(%i), backend_config={"flag_configs":[]}
  %next = s32[]{:T(128)} add(%copy.5, %one), metadata={op_name="while/body/add"}
  %x = f32[4]{0:T(128)S(1)} get-tuple-element(%p), index=1
  %sum = f32[4]{0:T(128)S(1)} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %t = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) tuple(%next, %sum)
}

%cond (p: (s32[], f32[4])) -> pred[] {
  %end = s32[]{:T(128)} constant(7)
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.14 = pred[]{:T(512)} compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %copy.11 = s32[]{:T(128)} copy(%zero)
  %t = (s32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%copy.11, %x)
  %loop = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) while(%t), condition=%cond, body=%body
  ROOT %r = f32[4]{0:T(128)} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("step", "turns"), [(1, 7), (2, 4)])
def test_a_loop_between_constants_is_counted_where_nothing_is_noted(step, turns):
    text = UNNOTED.replace("constant(1)", f"constant({step})")
    [found] = collectives_of(text, {"shard": 8})

    assert (found.count, found.is_counted) == (turns, True)


@pytest.mark.parametrize(
    ("counting", "otherwise"),
    [
        ("constant(7)", "parameter(1)"),  # to an end that is computed
        ("constant(0)", "parameter(1)"),  # from a start that is
        ("constant(1)", "parameter(1)"),  # by a step that is
        ("direction=LT", "direction=NE"),
        ("add(%copy.5, %one)", "multiply(%copy.5, %one)"),
        ("add(%copy.5, %one)", "add(%one, %one)"),
        ("add(%copy.5, %one)", "add(%copy.5, %copy.5)"),
    ],
)
def test_a_loop_that_counts_otherwise_is_of_unknown_length(counting, otherwise):
    assert UNNOTED.count(counting) == 1
    [found] = collectives_of(UNNOTED.replace(counting, otherwise), {"shard": 8})

    assert (found.count, found.is_counted) == (1, False)


def test_a_collective_that_fusions_of_a_chain_share_counts_once():
    shared = "replica_groups={{0,1,2,3,4,5,6,7}}"
    chained = f'{shared}, channel_id=3, frontend_attributes={{chain_id="1"}}'
    part = "%sum = f32[4]{0:T(128)S(1)} all-reduce(%x), "
    text = UNNOTED.replace(
        part + shared,
        f"{part}{chained}\n  {part.replace('%sum', '%more')}{chained}",
    )
    [found] = collectives_of(text, {"shard": 8})

    assert text.count(" all-reduce(") == 2
    assert found.count == 7


def test_a_program_without_text_has_no_collectives():
    assert collectives_of("", SIZES) == ()


ASYNCHRONOUS = """HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (w: f32[8,4]) -> f32[1,4] {
  %w = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %rs = f32[1,4]{1,0} reduce-scatter(%w), replica_groups=[1,8]<=[8]
}

ENTRY %main (x: bf16[4]) -> f32[4] {
  %x = bf16[4]{0:T(256)(128)} parameter(0), metadata={op_name="flat[1]"}
  %big = f32[8,4]{1,0} parameter(1)
  %start = (bf16[4]{0}, bf16[32]{0:T(256)(128)}) all-gather-start(%x), METADATA
  %rs-start = ((f32[8,4]{1,0}), f32[1,4]{1,0}) async-start(%big), calls=%wrapped
  %rs-done = f32[1,4]{1,0} async-done(%rs-start), calls=%wrapped
  ROOT %done = bf16[32]{0} all-gather-done(%start)
}
""".replace(
    "METADATA",
    "replica_groups=[1,8]<=[8], dimensions={0}, metadata="
    '{op_name="jit(step)/dot" source_file="train.py" source_line=12}',
)


def test_what_is_started_and_awaited_apart_counts_once():
    scatter, gather = collectives_of(
        ASYNCHRONOUS, {"shard": 4, "model": 2}, ["step", "params/w"]
    )

    assert (gather.kind, gather.count, gather.arrays) == (
        *("all-gather", 1),
        ("bf16[32]",),
    )
    assert gather.wire_bytes == 7 * 8
    assert gather.variable == "params/w"
    assert (scatter.kind, scatter.count) == ("reduce-scatter", 1)
    assert scatter.wire_bytes == 7 * 16
    assert scatter.axes == gather.axes == ("shard", "model")


# As the TPU compiler of libtpu 0.0.42 writes it, shortened.
FUSED = """HloModule jit_step, num_partitions=8

%all-reduce-scatter.12 (a: f32[8,16], b: f32[8,16]) -> (f32[8,2], f32[8,2]) {
  %a = f32[8,16]{1,0:T(8,128)S(1)} parameter(0)
  %b = f32[8,16]{1,0:T(8,128)S(1)} parameter(1)
  %sums = (f32[8,16]{1,0}, f32[8,16]{1,0}) all-reduce(%a, %b), GROUPS, to_apply=%add
  %sum = f32[8,16]{1,0:T(8,128)} get-tuple-element(%sums), index=0
  %at = u32[] partition-id()
  ROOT %t = (f32[8,2]{1,0}, f32[8,2]{1,0}) tuple(%sum, %sum)
}

ENTRY %main (x: f32[8,16]) -> f32[8,2] {
  %x = f32[8,16]{1,0:T(8,128)} parameter(0)
  %fusion.25 = (f32[8,2]{1,0}, f32[8,2]{1,0}) fusion(%x, %x), kind=kCustom, CALLS
  ROOT %r = f32[8,2]{1,0} get-tuple-element(%fusion.25), index=0
}
""".replace("GROUPS", "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}").replace(
    "CALLS",
    "calls=%all-reduce-scatter.12, metadata="
    '{op_name="jit(step)/dot" source_file="train.py" source_line=12}',
)


def test_a_fusion_of_a_reduction_and_a_slice_is_the_reduce_scatter_that_it_is():
    [found] = collectives_of(FUSED, {"shard": 8})

    assert (found.kind, found.count, found.axes) == ("reduce-scatter", 1, ("shard",))
    assert found.arrays == ("f32[8,16]", "f32[8,16]")
    assert found.wire_bytes == 7 * 128
    assert found.source == "train.py:12"


def test_text_that_names_lines_itself_is_read_too():
    _, gather = collectives_of(ASYNCHRONOUS, {"shard": 8})

    assert (gather.source, gather.op_name) == ("train.py:12", "jit(step)/dot")


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[0, 2], [1, 3]],
        ),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_groups_are_read_in_each_way_that_they_are_written(written, groups):
    instruction = Instruction(
        name="c",
        shape="f32[]",
        opcode="all-reduce",
        given="%x",
        attributes=f", channel_id=1, {written}, use_global_device_ids=true",
    )

    assert [list(group) for group in device_groups(instruction, 4)] == groups


def test_groups_of_other_devices_lie_along_no_axis():
    assert mesh_axes([[0, 9]], SIZES) == ()
