"""Run a function as the step of n replicas, and look into the program it becomes."""

import collections

import jax
import jax.numpy as jnp

from replicator.base.mesh import replica_mesh, replica_spec
from replicator.engine.analysis.dataflow import sub_jaxprs
from replicator.engine.partitioned import PartitionedLayout
from replicator.engine.replicated import ReplicatedLayout


def replicated_layout(n=8):
    """Return the layout of n replicas."""
    return ReplicatedLayout(replica_mesh(n))


def partitioned_layout(strategy):
    """Return the layout of a strategy that partitions, over all devices."""
    return PartitionedLayout(strategy, jax.devices())


def replicated_program(fn, n=8):
    """Return `fn` as a function of arrays whose row r is what replica r gets."""

    def replica(*rows):
        own = jax.tree.map(lambda leaf: leaf[0], rows)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], fn(*own))

    mesh, spec = replica_mesh(n), replica_spec()
    return jax.shard_map(
        replica, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


def on_replicas(fn, *arrays, n=8):
    """Run `fn` on n replicas; row r of each result is what replica r returned."""
    return jax.jit(replicated_program(fn, n))(*arrays)


def primitive_counts(fn, *arrays, n=8):
    """Count the primitives of the program that n replicas run, however deep."""
    counts = collections.Counter()

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] += 1
            for inner in sub_jaxprs(eqn):
                count(inner)

    count(jax.make_jaxpr(replicated_program(fn, n))(*arrays).jaxpr)
    return counts
