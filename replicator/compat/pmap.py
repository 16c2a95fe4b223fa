"""`pmap` as it was: one replica per device, a leading device axis, named collectives.

What JAX 0.10 and 0.12 still have under that name is written over `shard_map`, too, and
computes the same. This one differs where it matters to a program that just has to go
on running:

- At most four calls are in flight, on fake CPU devices of several processes one. A loop
  over JAX's that never waits aborts the process on eight fake devices (jax 0.10).
- Errors name the argument that is wrong, before anything is compiled.
- It does not end when JAX's does.

`result[0]` is as slow with both, about a millisecond: it is a program over all devices.
`replicator.compat.jax_utils.unreplicate(result)` takes the row from its device instead.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from replicator.base.mesh import listed_devices
from replicator.base.types import Device, PyTree
from replicator.compat.axes import (
    check_positions,
    common_size,
    name_leaves,
    require_function,
    with_sentinels,
)
from replicator.compat.layout import axis_mesh, local_rows, put_rows, several_processes
from replicator.compat.mapped_program import Call, MappedProgram
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD, RunAhead
from replicator.errors import ArgumentError

_ANONYMOUS = "pmap_axis"


def pmap(
    fn: Callable[..., PyTree],
    axis_name: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
    devices: Sequence[Device] | None = None,
    axis_size: int | None = None,
    backend: None = None,
    global_arg_shapes: None = None,
) -> Callable[..., PyTree]:
    """Run `fn` once on each device, over a leading device axis of its arguments.

    For code that was written with `jax.pmap`; new code is shorter with
    `replicator.Replicator`, and is proved to be right.

    Args:
      fn: What one replica does; arguments come without the device axis.
      axis_name: What collectives call the axis: `jax.lax.pmean(x, axis_name)`.
      in_axes: Which axis of each positional argument is the devices'; a prefix of the
        arguments' tree. None hands all of an argument to each device. Arguments by
        keyword always have it first.
      out_axes: Where that axis is in what comes back; None for none, where all replicas
        return the same.
      static_broadcasted_argnums: Positions of hashable arguments that are compiled in.
      donate_argnums: Positions of arguments whose memory the call may take.
      devices: Which to use, of all processes; by default the first ones, as many as the
        axis is long.
      axis_size: Length of the axis in this process, needed only where no argument
        has it; the number of all devices is accepted, too.
      backend: Must be None.
      global_arg_shapes: Must be None.

    Returns:
      The mapped function; its `lower` is that of `jax.jit`. It is compiled once for
      each set of shapes.

    Raises:
      ArgumentError: An argument of `pmap`, or later one of the mapped function, breaks
        its rule.

    >>> import jax, jax.numpy as jnp, replicator.compat
    >>> double = replicator.compat.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    >>> double(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    require_function(fn)
    for name, value in (("backend", backend), ("global_arg_shapes", global_arg_shapes)):
        if value is not None:
            raise ArgumentError(
                f"`{name}` must be None, got {value!r}. Leave it out, and choose "
                "devices by `devices`."
            )
    mapped = _Mapped(
        fn,
        _ANONYMOUS if axis_name is None else axis_name,
        in_axes=with_sentinels("in_axes", in_axes),
        out_axes=with_sentinels("out_axes", out_axes),
        static=check_positions(
            "static_broadcasted_argnums", static_broadcasted_argnums
        ),
        donated=check_positions("donate_argnums", donate_argnums),
        devices=None if devices is None else tuple(listed_devices(devices)),
        axis_size=axis_size,
    )

    # A plain function: as a method it is bound to its object.
    @functools.wraps(fn)
    def pmapped(*args: Any, **kwargs: Any) -> PyTree:
        return mapped.call(args, kwargs)

    pmapped.lower = mapped.lower  # type: ignore[attr-defined]
    return pmapped


class _Mapped:
    """What `pmap` was told, and a program for each way in which it was called."""

    def __init__(
        self,
        fn: Callable[..., PyTree],
        axis_name: Any,
        *,
        in_axes: Any,
        out_axes: Any,
        static: tuple[int, ...],
        donated: tuple[int, ...],
        devices: tuple[Device, ...] | None,
        axis_size: int | None,
    ):
        self._fn = fn
        self._axis_name = axis_name
        self._in_axes = in_axes
        self._out_axes = out_axes
        self._static = static
        self._donated = donated
        self._devices = devices
        self._axis_size = axis_size
        self._axes: dict[Any, tuple[int, ...]] = {}
        self._programs: dict[Call, MappedProgram] = {}

    def call(self, args: tuple, kwargs: dict[str, Any]) -> PyTree:
        program, leaves = self._prepare(args, kwargs)
        placed = put_rows(leaves, program.axes, program.mesh)
        traced = any(isinstance(leaf, Tracer) for leaf in placed)
        result, done = (program.run_traced if traced else program.run)(*placed)
        if isinstance(done, Tracer):
            return result
        _IN_FLIGHT.admit(done)
        if not several_processes(program.mesh):
            return result
        return jax.tree.map(lambda leaf: local_rows(leaf, program.mesh), result)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        program, leaves = self._prepare(args, kwargs)
        return program.run.lower(*put_rows(leaves, program.axes, program.mesh))

    def _prepare(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[MappedProgram, list[Any]]:
        _refuse_nesting()
        static, dynamic = self._split(args)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        axes = self._axes.get((tree, len(args)))
        if axes is None:
            axes = self._find_axes(tuple(dynamic), kwargs, len(args))
            self._axes[tree, len(args)] = axes
        size = self._size(dynamic, kwargs, leaves, axes)
        call = Call(tree=tree, static=static, size=size)
        try:
            program = self._programs.get(call)
        except TypeError as failure:
            raise ArgumentError(
                "`static_broadcasted_argnums` must name hashable arguments, got "
                f"{[type(value).__name__ for _, value in static]}. Pass arrays as "
                "ordinary arguments, with `in_axes` None."
            ) from failure
        if program is None:
            program = self._programs[call] = self._make(call, dynamic, kwargs, axes)
        return program, leaves

    def _split(self, args: tuple) -> tuple[tuple[tuple[int, Any], ...], list[Any]]:
        if not self._static:
            return (), list(args)
        if max(self._static) >= len(args):
            raise ArgumentError(
                "`static_broadcasted_argnums` must be positions of positional "
                f"arguments, got {self._static} for {len(args)} of them. Pass static "
                "arguments by position."
            )
        static = tuple((i, args[i]) for i in self._static)
        return static, [arg for i, arg in enumerate(args) if i not in self._static]

    def _find_axes(
        self, dynamic: tuple, kwargs: dict[str, Any], count: int
    ) -> tuple[int, ...]:
        axes = self._in_axes
        if isinstance(axes, tuple):
            if len(axes) != count:
                raise ArgumentError(
                    f"`in_axes` must have an entry for each of {count} positional "
                    f"arguments, got {len(axes)}. Use 0 for all of them."
                )
            axes = tuple(a for i, a in enumerate(axes) if i not in self._static)
        try:
            spread = jax.tree.broadcast(axes, dynamic)
        except ValueError as failure:
            raise ArgumentError(
                "`in_axes` must be a prefix of the positional arguments, got "
                f"{axes} for {jax.tree.structure(dynamic)}. Use 0 for all of them."
            ) from failure
        by_keyword = [0] * len(jax.tree.leaves(kwargs))
        return (*jax.tree.leaves(spread), *by_keyword)

    def _size(
        self, dynamic: list, kwargs: dict, leaves: list[Any], axes: tuple[int, ...]
    ) -> int:
        size = common_size(
            leaves, axes, lambda: name_leaves(self._fn, dynamic, kwargs, self._static)
        )
        if size is None:
            if self._axis_size is None:
                raise ArgumentError(
                    "`axis_size` must be given where no argument has a device axis, "
                    "got None. Pass `axis_size=jax.local_device_count()`."
                )
            return self._axis_size
        if self._axis_size not in (None, size, size * jax.process_count()):
            raise ArgumentError(
                f"`axis_size` must be the length of the device axis, {size}, got "
                f"{self._axis_size}. Leave it out."
            )
        return size

    def _make(
        self, call: Call, dynamic: list[Any], kwargs: dict, axes: tuple[int, ...]
    ) -> MappedProgram:
        positions = [
            i for i in range(len(dynamic) + len(call.static)) if i not in self._static
        ]
        donated: list[bool] = []
        for position, argument in zip(positions, dynamic, strict=True):
            donate = position in self._donated
            donated += [donate] * len(jax.tree.leaves(argument))
        donated += [False] * len(jax.tree.leaves(kwargs))
        return MappedProgram(
            self._fn,
            call,
            axes,
            out_axes=self._out_axes,
            donated=tuple(donated),
            mesh=axis_mesh(self._axis_name, self._choose_devices(call.size)),
        )

    def _choose_devices(self, size: int) -> tuple[Device, ...]:
        if self._devices is not None:
            here = [d for d in self._devices if d.process_index == jax.process_index()]
            if len(here) != size:
                raise ArgumentError(
                    "`devices` must have one device of this process for each row, got "
                    f"{len(here)} for {size} rows. Leave it out, or cut the batch "
                    "into as many rows."
                )
            return self._devices
        processes = range(jax.process_count())
        found = [jax.local_devices(process) for process in processes]
        if min(map(len, found)) < size:
            raise ArgumentError(
                f"`{self._name}` must be given at most {len(jax.local_devices())} "
                f"rows, one for each device of this process, got {size}. Reshape to "
                f"[{len(jax.local_devices())}, -1, ...] and use `jax.vmap` inside."
            )
        return tuple(device for devices in found for device in devices[:size])

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__name__", type(self._fn).__name__)


class _InFlight:
    """One bound for all mapped functions: what they fill is the one pool of XLA."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: RunAhead | None = None

    def admit(self, done: jax.Array) -> None:
        with self._lock:
            if self._ahead is None:
                self._ahead = RunAhead(_most_in_flight())
            self._ahead.admit(done)


_IN_FLIGHT = _InFlight()


def _most_in_flight() -> int:
    # Two gloo processes of several fake devices hang with more than one call in flight.
    on_cpu = jax.default_backend() == "cpu"
    return 1 if on_cpu and jax.process_count() > 1 else DEFAULT_RUN_AHEAD


def _refuse_nesting() -> None:
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ArgumentError(
            "`pmap` must not be called inside another `pmap`, got a call inside one. "
            "Use `jax.vmap(..., axis_name=...)` for the inner one."
        )
