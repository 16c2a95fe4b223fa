"""Check the collectives of a compiled step, for a user's own tests."""

from collections.abc import Container, Mapping

from replicator.base.tracebacks import short_traceback
from replicator.engine.inspection.collectives import KINDS, Collective
from replicator.engine.inspection.inspection import Inspection, origin
from replicator.errors import ArgumentError, CollectivesError

_LINES = 5  # in a message: those that send most


@short_traceback
def assert_collectives(
    found: Inspection, expected: Mapping[str, int | Container[int]]
) -> None:
    """Check that a compiled step has the collectives expected, and no others.

    Their number also depends on the compiler, which may join several into one. So test
    with one backend and version, or give a range.

    Args:
      found: Result of `rep.inspect`.
      expected: Number of each kind in a call, or a range; `0` for a kind that must be
        absent. A key is a kind, `"all-gather"`, or a kind along axes of the
        mesh, in its order, `"all-reduce replica,shard"`.

    Raises:
      CollectivesError: There are others; gives their number and lines.
      ArgumentError: A key does not name a kind, or axes of the mesh.

    >>> rep = replicator.Replicator()
    >>> assert_collectives(rep.inspect(step_fn, init_fn, batch), {"all-reduce": 1})
    """
    for key in expected:
        _check_key(key, tuple(found.mesh))
    named = {each for key in expected for each in _matching(found, key)}
    others = {each.name: 0 for each in found.collectives if each not in named}
    differing: dict[str, list[Collective]] = {}
    for key, wanted in [*expected.items(), *others.items()]:
        matching = _matching(found, key)
        count = sum(each.count for each in matching)
        if count != wanted and not (isinstance(wanted, Container) and count in wanted):
            differing[f"{key} {count} times instead of {_written(wanted)}"] = matching
    if differing:
        raise CollectivesError(_message(differing))


def _check_key(key: str, mesh: tuple[str, ...]) -> None:
    kind, *axes = key.split(" ", 1)
    if kind not in KINDS:
        raise ArgumentError(
            f"`expected` must name kinds of collectives, got {key!r}. Write one of "
            f"{', '.join(KINDS)}."
        )
    named = axes[0].split(",") if axes else []
    # Another name, or order, would match nothing: 0 of it would always pass.
    if named != [axis for axis in mesh if axis in named]:
        raise ArgumentError(
            f"`expected` must name axes of the mesh, in its order, got {key!r}. Write "
            f'"{kind} {",".join(mesh)}", or leave some out.'
        )


def _matching(found: Inspection, key: str) -> list[Collective]:
    return [each for each in found.collectives if key in (each.kind, each.name)]


def _written(wanted: int | Container[int]) -> str:
    if isinstance(wanted, range) and wanted:
        return f"{wanted[0]} to {wanted[-1]}"
    return str(wanted)


def _message(differing: Mapping[str, list[Collective]]) -> str:
    listed = {each for group in differing.values() for each in group}
    most = sorted(listed, key=lambda each: (-each.wire_bytes, each.name, each.source))
    lines = [
        f"  {each.count} {each.name} of {each.arrays[0]}, "
        f"{each.wire_bytes:,} bytes: {origin(each) or 'an unknown line'}"
        for each in most[:_LINES]
    ]
    if len(most) > _LINES:
        lines.append(f"  and {len(most) - _LINES} more, which send less")
    return "\n".join(
        [
            f"`step` must have the collectives expected, got {', '.join(differing)}:",
            *lines,
            "Mend the lines that send them, or expect them.",
        ]
    )
