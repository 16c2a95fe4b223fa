"""Batch norm as a module: its running statistics, and standing ones for sampling."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from replicator.base.trees import describe
from replicator.collectives.batch_norm import (
    RunningMoments,
    normalize,
    update_running,
    update_standing,
)
from replicator.collectives.moments import (
    Moments,
    Stats,
    batch_moments,
    check_stats,
    make_windows,
    pooled,
    wider_dtype,
)
from replicator.errors import (
    ArgumentError,
    check_number,
    check_whole,
)

Model = TypeVar("Model", bound=nnx.Module)


class BatchNorm(nnx.Module):
    """Batch norm over the global batch, in the place of `flax.nnx.BatchNorm`.

    Inside a replicated step the statistics span the replicas of `stats`; elsewhere they
    are those of the batch. `train()` and `eval()` switch between the batch's
    statistics and the running ones; `with_standing_statistics` to a plain mean over
    batches, for sampling with fixed weights.

    Padding does not count: not in the statistics if `weight` is 0 for it, and under
    accumulation microbatches of padding alone (`batch["mask"]`) leave the running
    statistics where they are, which move as if there were only the others.

    The running statistics move call by call. With several microbatches they can move
    once in a step: a second call that would move them, too, is refused.

    Attributes:
      scale: Factor per feature, or None.
      bias: Offset per feature, or None.
      mean: Running mean, always float32.
      var: Running biased variance, always float32.
      batches: Batches in the standing mean, or None while the mean is exponential.

    >>> norm = BatchNorm(3, rngs=nnx.Rngs(0))
    >>> x = jnp.arange(6.0).reshape(2, 3)
    >>> norm(x).round(2)                  # in a step: the statistics of all replicas
    Array([[-1., -1., -1.],
           [ 1.,  1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        stats: Stats = "all",
        stats_batch: int | None = None,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: Initializer = jax.nn.initializers.ones,
        bias_init: Initializer = jax.nn.initializers.zeros,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the parameters and the statistics of an untrained norm.

        Args:
          num_features: Size of the last axis of the inputs.
          use_running_average: Use the running statistics and leave them alone.
          momentum: Share of the running statistics that each update keeps, in [0, 1).
          epsilon: Added to the variance.
          stats: Replicas that share statistics: `"all"`, each `"replica"` for itself,
            runs of so many consecutive replicas, or explicit groups of replicas.
          stats_batch: Share over fixed runs of so many consecutive examples instead,
            for any number of replicas and microbatches.
          use_scale: Learn a factor per feature.
          use_bias: Learn an offset per feature.
          dtype: Dtype of the outputs; None for the widest of inputs and parameters.
          param_dtype: Dtype of the parameters.
          scale_init: Initializer of the factors.
          bias_init: Initializer of the offsets.
          rngs: Random keys for both.

        Raises:
          ArgumentError: An argument breaks its rule.
        """
        check_whole("num_features", num_features)
        check_number("momentum", momentum)
        check_number("epsilon", epsilon)
        check_stats(stats, stats_batch)
        if not 0 <= momentum < 1:
            raise ArgumentError(
                f"`momentum` must be in [0, 1), got {momentum}. "
                f"Use 0.9, or `eval()` to keep the running statistics as they are."
            )
        shape = (num_features,)
        self.scale: nnx.Param | None = nnx.data(None)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_scale:
            self.scale = nnx.Param(scale_init(rngs.params(), shape, param_dtype))
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype))
        self.mean = nnx.BatchStat(jnp.zeros(shape, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(shape, jnp.float32))
        self.batches: nnx.BatchStat | None = nnx.data(None)
        self.use_running_average = use_running_average
        self.momentum = momentum
        self.epsilon = epsilon
        self.stats: Stats = (
            stats if isinstance(stats, str | int) else tuple(map(tuple, stats))
        )
        self.stats_batch = stats_batch
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "batch *positions features"],
        *,
        weight: Shaped[Array, "batch"] | None = None,
        use_running_average: bool | None = None,
    ) -> Float[Array, "batch *positions features"]:
        """Normalise this replica's examples, and move the running statistics.

        Args:
          x: This replica's examples.
          weight: Weight of each example in the statistics; 0 for padding. Where
            statistics are shared by padding alone, outputs and gradients are 0.
          use_running_average: Overrides the mode of `train()` or `eval()`.

        Returns:
          The normalised examples.

        Raises:
          ArgumentError: `x` has another number of features, or `stats` or
            `stats_batch` does not fit the replicas.
        """
        running = RunningMoments(self.mean[...], self.var[...])
        if x.shape[-1:] != running.mean.shape:
            raise ArgumentError(
                f"`x` must have {len(running.mean)} features in its last axis, got "
                f"{describe(x)}. Make the norm with `num_features={x.shape[-1]}`."
            )
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average:
            return self._normalize(x, running)
        windows = make_windows(len(x), stats=self.stats, stats_batch=self.stats_batch)
        moments = batch_moments(x, windows, weight=weight)
        self._move(running, pooled(moments, windows))
        return self._normalize(x, moments)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set the mode of a view that `flax.nnx.view` makes.

        Args:
          use_running_average: As for the constructor; None leaves it as it is.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _normalize(self, x: Array, moments: Moments | RunningMoments) -> Array:
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        y = normalize(x, moments, scale=scale, bias=bias, epsilon=self.epsilon)
        dtypes = [each.dtype for each in (x, scale, bias) if each is not None]
        return y.astype(wider_dtype(*dtypes) if self.dtype is None else self.dtype)

    def _move(self, running: RunningMoments, moments: Moments) -> None:
        if self.batches is None:
            moved = update_running(running, moments, momentum=self.momentum)
        else:
            moved, batches = update_standing(running, moments, self.batches[...])
            self.batches.set_value(batches)
        # `self.mean[...] = mean` asks a tracer for its sharding, which it has not: to
        # make the message of that error takes JAX 3 ms, each time.
        self.mean.set_value(moved.mean)
        self.var.set_value(moved.var)


def with_standing_statistics(model: Model) -> Model:
    """Copy a model so that its norms average all batches that they see from now on.

    Every batch weighs alike. Show the copy as many batches as the average needs, then
    sample in `eval()` mode (Brock et al. 2018, appendix B). The model itself stays
    fit for training.

    Args:
      model: Any module; the `BatchNorm`s inside it take part.

    Returns:
      The copy, whose norms use the statistics of the batch and have seen none yet.

    >>> generator = BatchNorm(3, rngs=nnx.Rngs(0))  # or a model with some in it
    >>> sampler = with_standing_statistics(generator)
    >>> for latents in jnp.ones((2, 4, 3)):
    ...     _ = sampler(latents)
    >>> sampler.eval()
    """
    copy = nnx.clone(model)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, BatchNorm):
            module.use_running_average = False
            module.batches = nnx.BatchStat(jnp.zeros((), jnp.float32))
    return copy
