import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from replicator.collectives import all_reduce, num_replicas, replica_id
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

ONES = np.ones(8, np.float32)


def test_each_replica_knows_its_id_and_how_many_there_are():
    ids, sizes = on_replicas(lambda _: (replica_id(), num_replicas()), ONES)
    assert ids.dtype == jnp.int32
    assert ids.tolist() == list(range(8))
    assert sizes.tolist() == [8] * 8


def test_outside_any_replica_context_there_is_one_replica():
    assert num_replicas() == 1
    assert replica_id() == 0
    assert replica_id().dtype == jnp.int32


def test_vmap_with_the_axis_name_is_a_replica_context():
    found = jax.vmap(all_reduce, axis_name="replica")(jnp.arange(4.0))
    assert found.tolist() == [1.5] * 4


def test_an_automatic_mesh_axis_is_no_replica_context(mesh):
    with jax.set_mesh(mesh):
        assert jax.jit(lambda: num_replicas())() == 1


def test_another_axis_may_be_named():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    total = jax.shard_map(
        lambda x: all_reduce(x, "sum", axis_name="data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    assert jax.jit(total)(jnp.arange(1.0, 3.0)).tolist() == [3, 3]


@pytest.mark.parametrize("call", [num_replicas, replica_id])
def test_a_dead_axis_is_refused(call):
    with pytest.raises(ArgumentError) as caught:
        call(axis_name="replcia")
    assert str(caught.value) == (
        "`axis_name` must name a live axis, got the dead axis 'replcia' (bound by "
        "`shard_map` here: none). Pass the `axis_name` of the mesh that runs this."
    )


def test_a_foreign_shard_map_does_not_pass_for_one_replica():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    reduce = jax.shard_map(all_reduce, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ArgumentError, match=r"dead axis 'replica' .*'data'"):
        jax.jit(reduce)(jnp.ones(2))


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3]], [[0, 1, 2, 3], [3, 4, 5, 6, 7]], [list(range(8)), []]]
)
def test_groups_name_every_replica_once(groups):
    with pytest.raises(ArgumentError) as caught:
        on_replicas(lambda x: all_reduce(x, groups=groups), ONES)
    assert str(caught.value) == (
        f"`groups` must name each of the 8 replicas exactly once, got {groups}. "
        "All in one group is [[0, 1, 2, 3, 4, 5, 6, 7]]."
    )


def test_one_replica_has_one_group():
    assert all_reduce(2.0, groups=[[0]]) == 2
    with pytest.raises(ArgumentError, match=r"each of the 1 replicas .*\[\[0, 1\]\]"):
        all_reduce(2.0, groups=[[0, 1]])
