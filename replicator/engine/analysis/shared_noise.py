"""Find random numbers that replicas and microbatches share, where examples want theirs.

A key that folds neither replica nor microbatch draws the same numbers on each. That is
right for noise on weights, and for noise like weights (the signs of an estimate of
curvature): one device draws it once for its batch, too. It is wrong
where the numbers meet examples (a dropout mask) or stand for them (the latents of a
GAN): then they depend on how the global batch is cut. Numbers meet examples in an
equation with a value that varies. Numbers that stand for examples went through weights,
as an input of theirs, and are reduced over replicas or added to a reduced value.
"""

import warnings
from collections.abc import Collection, Sequence

from jax.extend import core

from replicator.engine.analysis.marks import Mark, Noise, Origin, join
from replicator.engine.analysis.source_lines import user_stacklevel

SOURCES = frozenset(
    {"random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"}
)
_ELEMENTWISE = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2"),
        *("and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne", "select_n", "clamp"),
        *("nextafter", "complex"),
    }
)
# By primitive: the operands that meet examples there, from this one on.
_MEETINGS = {
    **dict.fromkeys((*_ELEMENTWISE, "concatenate", "sort", "pad"), 0),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_mul", "scatter-mul"), 0),
    **dict.fromkeys(("scatter-min", "scatter-max", "dynamic_update_slice"), 0),
    "gather": 1,  # rows of a random table that examples choose are the same for all
}
_SUMS = frozenset({"add", "sub"})


class SharedRandomKeyWarning(UserWarning):
    """Every replica draws the same random numbers where its own were likely meant."""


class SharedNoise:
    """Random numbers of one step that its replicas should not share.

    Attributes:
      found: Draws of such numbers, by the user's line.
    """

    def __init__(
        self, examples: int, weights: Collection[tuple[int, ...]] = ()
    ) -> None:
        """Look for noise over examples.

        Args:
          examples: Length of a replica's batch axis.
          weights: Shapes of the arrays of the state.
        """
        # An axis of length 1 may be anything.
        self._examples = examples if examples > 1 else None
        self._weights = frozenset(weights)
        self.found: dict[str, Origin] = {}

    def draw(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark], origin: Origin
    ) -> Mark | None:
        """Return the mark of numbers that `eqn` draws; None where they vary."""
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
        # A scalar is drawn for all, and likely meant so.
        if not any(shapes):
            return None
        noise = Noise(origin, any(map(self._is_by_example, shapes)))
        if not noise.by_example and shapes[0] in self._weights and shapes[0]:
            like_weights = Mark(noise=noise._replace(on_weights=True), weights=True)
            return None if join(marks).varying else like_weights
        if eqn.primitive.name != "random_gamma":
            return None if join(marks).varying else Mark(noise=noise)
        parameters = join(marks[1:])
        if parameters.varying and not marks[0].varying:
            self._note(noise)
        varying = parameters.varying or marks[0].varying
        return None if varying else Mark(noise=noise, weights=parameters.weights)

    def through(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> Mark | None:
        """Look at an equation that noise enters; return its mark, None for the join."""
        name = eqn.primitive.name
        if any(mark.varying for mark in marks):
            self._meet(eqn, marks)
            return None
        if name in _ELEMENTWISE:
            return _on_weights(marks)
        if name == "broadcast_in_dim":
            return _broadcast(eqn, marks[0])
        return None

    def reduce(self, marks: Sequence[Mark]) -> None:
        """Look at values that are reduced over replicas."""
        for mark in marks:
            if mark.noise and (mark.noise.by_example or _stands(mark)):
                self._note(mark.noise)

    def warn(self, part: str) -> None:
        """Warn of the draws that were found: all of these parts draw the same.

        Args:
          part: `"replica"` or `"microbatch"`.
        """
        own = "`replicator.example_keys(key, n)` for numbers of each example's own"
        if part == "replica":
            mine = "`replicator.replica_key(key)` for numbers of each replica's own"
            own = f"{mine}, {own}"
        for origin in self.found.values():
            warnings.warn(
                f"every {part} draws the same random numbers at {origin.where}. Use "
                f"{own}; give an NNX module such a key with `nnx.reseed`; pass numbers "
                "that all should share through `replicator.assume_replicated`.",
                SharedRandomKeyWarning,
                stacklevel=user_stacklevel(),
            )

    def _meet(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> None:
        name = eqn.primitive.name
        first = _MEETINGS.get(name)
        for position, mark in enumerate(marks):
            if mark.noise is None:
                continue
            if name == "dot_general":
                met = mark.noise.by_example and _over_examples(eqn, position)
            else:
                met = first is not None and position >= first
                met = met and self._is_own(eqn, position, mark, mark.noise)
            if met:
                self._note(mark.noise)

    def _is_own(
        self, eqn: core.JaxprEqn, position: int, mark: Mark, noise: Noise
    ) -> bool:
        """Return whether each example should have noise of its own here."""
        if not mark.weights:
            # Where a slice starts is a scalar: one place for all.
            return eqn.primitive.name != "dynamic_update_slice" or position < 2
        shape = getattr(eqn.invars[position].aval, "shape", ())
        if noise.by_example and self._is_by_example(shape):
            return True
        name = eqn.primitive.name
        # Rows beside rows of examples; losses and gradients beside theirs.
        beside = (
            name == "add_any"
            or (name in _SUMS and not shape)
            or (name == "concatenate" and eqn.params["dimension"] == 0)
        )
        return beside and _stands(mark)

    def _is_by_example(self, shape: tuple[int, ...]) -> bool:
        leading = shape[: 2 if len(shape) > 2 else 1]  # time may come first
        return self._examples in leading

    def _note(self, noise: Noise) -> None:
        self.found[noise.origin.where] = noise.origin


def _stands(mark: Mark) -> bool:
    return mark.noise is not None and mark.weights and not mark.noise.on_weights


def _on_weights(marks: Sequence[Mark]) -> Mark | None:
    """Return the mark of noise that meets weights element by element."""
    joined = join(marks)
    if joined.noise is None or not joined.weights or any(map(_stands, marks)):
        return None
    return joined._replace(noise=joined.noise._replace(on_weights=True))


def _broadcast(eqn: core.JaxprEqn, mark: Mark) -> Mark | None:
    """Return the mark of noise that is repeated along a new first axis."""
    kept = eqn.params["broadcast_dimensions"][:1] == (0,)
    if kept or mark.noise is None:
        return None
    return mark._replace(noise=mark.noise._replace(by_example=False))


def _over_examples(eqn: core.JaxprEqn, position: int) -> bool:
    """Return whether operand `position` lines up with the first axis of the other."""
    contracted, batched = eqn.params["dimension_numbers"]
    return 0 in (*contracted[1 - position], *batched[1 - position])
