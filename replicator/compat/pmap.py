"""`pmap` as it was: one replica per device, a leading device axis, named collectives.

The function of that name in JAX 0.10 to 0.12 is written over `shard_map`, too, and
computes the same. This one differs where it matters to a program that just has to keep
running:

- At most four calls are in flight, on fake CPU devices of several processes one. A loop
  over JAX's that never waits aborts the process on eight fake devices (jax 0.10).
- Errors name the argument that is wrong, before anything is compiled.
- It does not end when JAX's does.

`result[0]` is as slow with both, about a millisecond: it is a program over all devices.
`replicator.compat.jax_utils.unreplicate(result)` takes the row from its device instead.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from replicator.base.mesh import listed_devices
from replicator.base.tracebacks import short_traceback, short_tracebacks
from replicator.base.types import Device, PyTree
from replicator.compat import layout
from replicator.compat.axes import (
    check_positions,
    common_size,
    name_leaves,
    require_function,
    with_axes,
    with_sentinels,
)
from replicator.engine.require_eager import in_no_mesh
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD, RunAhead
from replicator.errors import ArgumentError

_ANONYMOUS = "pmap_axis"


@short_traceback
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
      fn: Function of one replica; arguments come without the device axis.
      axis_name: Name of the axis in collectives: `jax.lax.pmean(x, axis_name)`.
      in_axes: Device axis of each positional argument; a prefix of the arguments' tree.
        With None each device gets all of an argument. Arguments by keyword always have
        it first.
      out_axes: Device axis of each result; None for none, if all replicas return the
        same.
      static_broadcasted_argnums: Positions of hashable arguments that are compiled in.
      donate_argnums: Positions of arguments whose memory the call may take.
      devices: Devices of all processes; by default the first ones, as many as the axis
        is long.
      axis_size: Length of the axis in this process, needed only where no argument
        has it; the number of all devices is accepted, too.
      backend: Must be None.
      global_arg_shapes: Must be None.

    Returns:
      The mapped function; it is compiled once for each set of shapes. Its `lower` is
      that of `jax.jit`, whose compiled function is called without static arguments.

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
    @short_traceback
    @functools.wraps(fn)
    def pmapped(*args: Any, **kwargs: Any) -> PyTree:
        return mapped.call(args, kwargs)

    pmapped.lower = short_traceback(mapped.lower)  # type: ignore[attr-defined]
    return pmapped


@dataclasses.dataclass(eq=False)
class _Mapped:
    """Arguments of `pmap`; JAX keeps a program for each way in which it is called."""

    fn: Callable[..., PyTree]
    axis_name: Any
    _: dataclasses.KW_ONLY
    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]
    devices: tuple[Device, ...] | None
    axis_size: int | None

    def __post_init__(self) -> None:
        static = (0, 1, *(2 + position for position in self.static))
        donated = {2 + position for position in self.donated}.difference(static)
        self._run = jax.jit(
            self._program, static_argnums=static, donate_argnums=tuple(donated)
        )
        # A larger program decides itself about donation.
        self._run_traced = jax.jit(self._program, static_argnums=static)
        self._axes: dict[Any, tuple[int, ...]] = {}
        self._meshes: dict[int, Mesh] = {}

    @in_no_mesh
    def call(self, args: tuple, kwargs: dict[str, Any]) -> PyTree:
        run, mesh, axes, placed, by_name = self._prepare(args, kwargs)
        return self._returned(run(mesh, axes, *placed, **by_name), mesh)

    def call_compiled(
        self, compiled: Any, first: tuple, args: tuple, kwargs: dict[str, Any]
    ) -> PyTree:
        """Call the program compiled for arguments like `first`, without static ones."""
        count = len(self._dynamic(first))
        if len(args) != count:
            raise ArgumentError(
                f"`args` must be the {count} positional arguments, got {len(args)}. "
                "Leave static ones out: they are compiled in."
            )
        _, mesh, _, placed, by_name = self._prepare(
            tuple(self._merged(first, args)), kwargs
        )
        return self._returned(compiled(*self._dynamic(placed), **by_name), mesh)

    def _returned(self, outputs: tuple[PyTree, Any], mesh: Mesh) -> PyTree:
        result, done = outputs
        if isinstance(done, Tracer):
            return result
        with _LOCK:
            _in_flight().admit(done)
        if not layout.several_processes(mesh):
            return result
        return jax.tree.map(lambda leaf: layout.local_rows(leaf, mesh), result)

    @in_no_mesh
    def lower(self, *args: Any, **kwargs: Any) -> "_Stage":
        run, mesh, axes, placed, by_name = self._prepare(args, kwargs)
        return _Stage(self, args, run.lower(mesh, axes, *placed, **by_name))

    def _program(
        self, mesh: Mesh, axes: tuple[int, ...], /, *args: Any, **kwargs: Any
    ) -> tuple[PyTree, jax.Array]:
        """Run the function on each device.

        There is one more result, a byte for each device: the others may be donated to
        the next call, and a caller must be able to wait for this one.
        """
        leaves, tree = jax.tree.flatten((self._dynamic(args), kwargs))

        def one_replica(*rows: jax.Array) -> tuple[PyTree, jax.Array]:
            own = [
                row if axis == layout.WHOLE else jax.lax.squeeze(row, (axis,))
                for row, axis in zip(rows, axes, strict=True)
            ]
            dynamic, by_name = jax.tree.unflatten(tree, own)
            result = self.fn(*self._merged(args, dynamic), **by_name)
            return with_axes(result, self.out_axes), jnp.zeros((1,), jnp.uint8)

        return jax.shard_map(
            one_replica,
            mesh=mesh,
            in_specs=tuple(layout.axis_spec(mesh, axis) for axis in axes),
            out_specs=(
                jax.tree.map(lambda axis: layout.axis_spec(mesh, axis), self.out_axes),
                layout.axis_spec(mesh, 0),
            ),
            # As under `pmap`: gradients are those of one replica, and third-party scans
            # with a constant first carry are allowed.
            check_vma=False,
        )(*leaves)

    def _prepare(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Mesh, tuple[int, ...], list[Any], dict[str, Any]]:
        """Return a program, its two static arguments, and the user's ones, placed."""
        _refuse_nesting()
        self._check_static(args)
        dynamic = self._dynamic(args)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        axes = self._axes.get((tree, len(args)))
        if axes is None:
            axes = self._find_axes(tuple(dynamic), kwargs, len(args))
            self._axes[tree, len(args)] = axes
        size = self._size(dynamic, kwargs, leaves, axes)
        mesh = self._meshes.get(size)
        if mesh is None:
            mesh = layout.axis_mesh(self.axis_name, self._choose_devices(size))
            self._meshes[size] = mesh
        placed = layout.put_rows(leaves, axes, mesh)
        own, by_name = jax.tree.unflatten(tree, placed)
        is_traced = any(isinstance(leaf, Tracer) for leaf in placed)
        run = self._run_traced if is_traced else self._run
        return run, mesh, axes, self._merged(args, own), by_name

    def _check_static(self, args: tuple) -> None:
        if self.static and max(self.static) >= len(args):
            raise ArgumentError(
                "`static_broadcasted_argnums` must be positions of positional "
                f"arguments, got {self.static} for {len(args)} of them. Pass static "
                "arguments by position."
            )
        static = [args[position] for position in self.static]
        try:
            hash(tuple(static))
        except TypeError as failure:
            raise ArgumentError(
                "`static_broadcasted_argnums` must name hashable arguments, got "
                f"{[type(value).__name__ for value in static]}. Pass arrays as "
                "ordinary arguments, with `in_axes` None."
            ) from failure

    def _dynamic(self, args: Sequence[Any]) -> list[Any]:
        return [arg for i, arg in enumerate(args) if i not in self.static]

    def _merged(self, args: Sequence[Any], dynamic: Iterable[Any]) -> list[Any]:
        """Put other arguments in place of those that are not static."""
        others = iter(dynamic)
        return [arg if i in self.static else next(others) for i, arg in enumerate(args)]

    def _find_axes(
        self, dynamic: tuple, kwargs: dict[str, Any], count: int
    ) -> tuple[int, ...]:
        axes = self.in_axes
        if isinstance(axes, tuple):
            if len(axes) != count:
                raise ArgumentError(
                    f"`in_axes` must have an entry for each of {count} positional "
                    f"arguments, got {len(axes)}. Use 0 for all of them."
                )
            axes = tuple(a for i, a in enumerate(axes) if i not in self.static)
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
            leaves, axes, lambda: name_leaves(self.fn, dynamic, kwargs, self.static)
        )
        if size is None:
            if self.axis_size is None:
                raise ArgumentError(
                    "`axis_size` must be given where no argument has a device axis, "
                    "got None. Pass `axis_size=jax.local_device_count()`."
                )
            return self.axis_size
        if self.axis_size not in (None, size, size * jax.process_count()):
            raise ArgumentError(
                f"`axis_size` must be the length of the device axis, {size}, got "
                f"{self.axis_size}. Leave it out."
            )
        return size

    def _choose_devices(self, size: int) -> tuple[Device, ...]:
        if self.devices is not None:
            here = [d for d in self.devices if d.process_index == jax.process_index()]
            if len(here) != size:
                raise ArgumentError(
                    "`devices` must have one device of this process for each row, got "
                    f"{len(here)} for {size} rows. Leave it out, or cut the batch "
                    "into as many rows."
                )
            return self.devices
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
        return getattr(self.fn, "__name__", type(self.fn).__name__)


@short_tracebacks
@dataclasses.dataclass(eq=False)
class _Stage:
    """A lowered or compiled program of JAX, called as the mapped function is."""

    mapped: _Mapped
    args: tuple
    stage: Any

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        return dataclasses.replace(self, stage=self.stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        return self.mapped.call_compiled(self.stage, self.args, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


# All mapped functions share one bound, as they share XLA's one pool. The lock guards
# the bound; it is held while a call waits for those before it: others wait as well.
_LOCK = threading.Lock()


@functools.cache
def _in_flight() -> RunAhead:
    # Two gloo processes of several fake devices hang with more than one call in flight.
    on_cpu = jax.default_backend() == "cpu"
    return RunAhead(1 if on_cpu and jax.process_count() > 1 else DEFAULT_RUN_AHEAD)


def _refuse_nesting() -> None:
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ArgumentError(
            "`pmap` must not be called inside another `pmap`, got a call inside one. "
            "Use `jax.vmap(..., axis_name=...)` for the inner one."
        )
