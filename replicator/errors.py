"""Every exception that `replicator` raises itself, in one tree.

    ReplicatorError
    ├── ArgumentError (ValueError)          an argument breaks its rule
    ├── BatchError (ValueError)             a batch does not fit step or replicas
    ├── StateError (ValueError)             a step returned another structure
    ├── ReplicationError (ValueError)       state may differ between replicas
    ├── TooLateError (RuntimeError)         JAX started before it was set up
    ├── InputTimeoutError (TimeoutError)    the input yielded nothing within its limit
    ├── NonFiniteError (FloatingPointError) a number became NaN or infinite
    └── InvarianceError (AssertionError)    the answer depends on the number of replicas

Each also inherits the builtin that it refines, so `except ValueError` works. A message
reads: "`argument` must <rule>, got <value>. <One remedy>."
"""


class ReplicatorError(Exception):
    """Base of all errors that `replicator` raises itself."""


class ArgumentError(ReplicatorError, ValueError):
    """An argument breaks its rule."""


class BatchError(ReplicatorError, ValueError):
    """A batch does not fit the step, the replicas, or the batches before it."""


class StateError(ReplicatorError, ValueError):
    """A step returned a state whose structure, shapes or dtypes changed."""


class ReplicationError(ReplicatorError, ValueError):
    """A leaf of the state may differ between replicas (design law 2)."""


class TooLateError(ReplicatorError, RuntimeError):
    """JAX already started with a setting that had to be chosen before."""


class InputTimeoutError(ReplicatorError, TimeoutError):
    """The input yielded no batch within its limit."""


class NonFiniteError(ReplicatorError, FloatingPointError):
    """A batch or a metric holds NaN or infinity."""


class InvarianceError(ReplicatorError, AssertionError):
    """A step gives another answer on another number of replicas (design law 1)."""
