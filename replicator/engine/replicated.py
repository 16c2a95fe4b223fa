"""Give each device a replica: `shard_map` over a mesh whose only axis is `replica`.

Parameters are whole on each device; replicas exchange values by the user's collectives
and the wrapped optimizer. `replication_check` proves that the state stays equal, which
`shard_map` does not check.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.flat_tree import FlatTree, whole
from replicator.base.mesh import readable, replica_spec, split_over_replicas
from replicator.base.padded import unpadded
from replicator.base.per_replica import (
    declared_leaves,
    give_own,
    per_replica_specs,
    take_own,
)
from replicator.base.types import PyTree
from replicator.engine.analysis import dataflow
from replicator.engine.analysis import replication_check as proof
from replicator.engine.analysis.other_meshes import names_axes, refuse_other_meshes
from replicator.engine.layout import STATE, OneProcess, ProcessGroup, ValueKind
from replicator.engine.reduction.rules import check_rules
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.strategies.builders import data_parallel
from replicator.strategies.strategy import Strategy

_NO_MESH = jax.sharding.AbstractMesh((), ())


class ReplicatedLayout:
    """Many replicas, one device each; see `Layout` for attributes and methods.

    Args:
      mesh: The devices, under the axis `replica`.
      processes: The processes that share them.
      strategy: A strategy that replicates, whose rules decide how gradients add up.

    Raises:
      ArgumentError: The strategy does not fit the devices.
    """

    def __init__(
        self,
        mesh: Mesh,
        processes: ProcessGroup | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.mesh = mesh
        self.strategy = strategy or data_parallel()
        self.strategy.sizes(mesh.size)
        self.processes = processes or OneProcess()
        self.num_replicas = mesh.size
        self.batch_owners = [device.process_index for device in mesh.devices.flat]
        # Called for each batch; JAX takes a sharding that it has seen in less time.
        self._cut = functools.cache(functools.partial(split_over_replicas, mesh))

    def batch_shardings(self, shapes: PyTree, *, axis: int) -> PyTree:
        """Return one sharding for all leaves: each replica has its rows."""
        del shapes
        return self._cut(axis=axis)

    def pad_state(self, state: PyTree) -> PyTree:
        """Return a state without padding: each replica keeps all of it."""
        return unpadded(state)

    def state_shardings(self, shapes: PyTree) -> list[NamedSharding]:
        """Return a sharding for each leaf: declared ones are cut over replicas."""
        return [NamedSharding(self.mesh, spec) for spec in per_replica_specs(shapes)]

    def check_state(self, shapes: PyTree) -> None:
        """Accept any state: there are no rules for variables."""
        del shapes

    def spread(
        self, fn: Callable[..., Any], *, inputs: tuple[ValueKind, ...], outputs: PyTree
    ) -> Callable[..., Any]:
        """Return the function of all replicas together, as one `shard_map`."""

        def replica(*values: PyTree) -> PyTree:
            own = [
                take_own(whole(value)) if kind == STATE else value
                for kind, value in zip(inputs, values, strict=True)
            ]
            return jax.tree.map(_give_back, outputs, fn(*own))

        def program(*values: PyTree) -> PyTree:
            given = [
                # Specs are not arrays: a node that checks itself refuses them.
                FlatTree.of(value) if kind == STATE else value
                for kind, value in zip(inputs, values, strict=True)
            ]

            def specs(kind: ValueKind) -> PyTree:
                if kind != STATE:
                    return _spec(kind)
                state: FlatTree = given[inputs.index(STATE)]
                return FlatTree(per_replica_specs(state.tree), state.structure)

            def on_all(replica: Callable[..., PyTree]) -> PyTree:
                return jax.shard_map(
                    replica,
                    mesh=self.mesh,
                    in_specs=tuple(map(specs, inputs)),
                    out_specs=jax.tree.map(specs, outputs),
                    # Gradients of replicated parameters must stay local until the
                    # optimizer reduces them; `check` proves that the state is equal.
                    check_vma=False,
                )(*given)

            try:
                results = on_all(replica)
            except ValueError as failure:
                if not names_axes(failure):
                    raise
                # Boxes of flax linen: they constrain what they hold, by names of any
                # axes, where a mesh is in context, and hand it out where none is.
                results = on_all(_in_no_mesh(replica))
            return jax.tree.map(self._readable, outputs, results)

        return program

    def _readable(self, kind: ValueKind, result: PyTree) -> PyTree:
        if kind == STATE:
            return whole(result)
        apart = kind.name in ("examples", "per_replica")
        return readable(result, self.mesh) if apart else result

    def check(
        self, traced: core.Jaxpr, state: PyTree, batch: PyTree, *, batch_axis: int
    ) -> None:
        """Prove that the state is equal on all replicas, declared leaves apart.

        Raises:
          ArgumentError: The step constrains a value to another mesh, or a rule of the
            strategy has no part in it.
          ReplicationError: A leaf may differ; see `prove_replicated`.

        Warns:
          SharedRandomKeyWarning: All replicas draw the same numbers for their examples.
        """
        check_rules(self.strategy, optimizer_states(state))
        [eqn] = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
        [inside] = dataflow.sub_jaxprs(eqn)
        refuse_other_meshes(inside, self.mesh.axis_names)
        leaves = declared_leaves(state)
        marks = [proof.DECLARED if declared else proof.STATE for _, declared in leaves]
        marks += [proof.BATCH] * len(jax.tree.leaves(batch))
        marks += [proof.CLEAN] * (len(traced.invars) - len(marks))  # the key
        # Arrays that the step closes over come first; they are the same everywhere.
        constants = len(inside.invars) - len(marks)
        # The user's own names: a run keeps the user's state in one of its own.
        paths = [
            None if declared else path.removeprefix("user/")
            for path, declared in leaves
        ]
        proof.prove_replicated(
            inside,
            [proof.CLEAN] * constants + marks,
            paths + [None] * (len(inside.outvars) - len(paths)),
            num_replicas=self.num_replicas,
            batch_axis=batch_axis,
        )

    def describe(self) -> dict[str, Any]:
        """Return engine, mesh and the strategy's rules in plain JSON, for records."""
        rules = self.strategy.as_json() if self.strategy.rules else {}
        return {"engine": "replicates", "mesh": dict(self.mesh.shape), **rules}


def _in_no_mesh(replica: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def run(*values: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return replica(*values)

    return run


def _give_back(kind: ValueKind, result: PyTree) -> PyTree:
    """Return a replica's result in the form in which all are put together."""
    if kind == STATE:
        return FlatTree.of(give_own(result))
    if kind.name == "per_replica":
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, kind.axis), result)
    return result


def _spec(kind: ValueKind) -> PartitionSpec:
    return PartitionSpec() if kind.name == "equal" else replica_spec(kind.axis)
