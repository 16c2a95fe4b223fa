"""Norms and training steps for flax NNX modules; flax is met here only.

A module is a pytree and lives in the state like any other. A step differentiates with
respect to its parameters, which are plain nested dicts of arrays, and gets back a moved
copy that holds the new batch statistics; the module in the state is never written to:

    def init_fn(key):
        model = ResNet(depth=18, num_classes=10, rngs=nnx.Rngs(key))
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def loss_fn(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"]).mean()

    def step_fn(state, batch):
        (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
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
from replicator.engine.step.gradients import LocalSum, as_mean, checked_sum
from replicator.errors import (
    ArgumentError,
    check_function,
    check_number,
    check_whole,
)

Model = TypeVar("Model", bound=nnx.Module)


class BatchNorm(nnx.Module):
    """Batch norm over the global batch, in the place of `flax.nnx.BatchNorm`.

    Inside a replicated step the statistics span replicas as `stats` says; elsewhere
    they are those of the batch. `train()` and `eval()` switch between the batch's
    statistics and the running ones; `with_standing_statistics` to a plain mean over
    batches, for sampling with fixed weights.

    Padding does not count: not in the statistics if `weight` is 0 for it, and under
    accumulation microbatches of padding alone (`batch["mask"]`) leave the running
    statistics where they are, which move as if there were only the others.

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
          momentum: What each update keeps of the running statistics, in [0, 1).
          epsilon: Added to the variance.
          stats: Who shares statistics: `"all"` replicas, each `"replica"` for itself,
            runs of so many consecutive replicas, or explicit groups of replicas.
          stats_batch: Share over fixed runs of so many consecutive examples instead,
            for any number of replicas and microbatches.
          use_scale: Learn a factor per feature.
          use_bias: Learn an offset per feature.
          dtype: Of the outputs; None takes the widest of inputs and parameters.
          param_dtype: Of the parameters.
          scale_init: Makes the factors.
          bias_init: Makes the offsets.
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
          weight: How much each example counts in the statistics; 0 for padding. Where
            statistics are shared by padding alone, outputs and gradients are 0.
          use_running_average: Overrides what `train()` or `eval()` set.

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
        # `self.mean[...] = mean` asks a tracer for its sharding, which it has not: the
        # words of that error take JAX 3 ms to find, each time.
        self.mean.set_value(moved.mean)
        self.var.set_value(moved.var)


class SpectralNorm(nnx.Module):
    """A layer whose kernel is divided by an estimate of its largest singular value.

    Miyato et al. 2018, "Spectral normalization for generative adversarial networks",
    algorithm 1, in the place of `flax.nnx.SpectralNorm`. Each call estimates by one
    step of power iteration; in `train()` mode it also keeps the singular vector for the
    next. Gradients take both vectors as constants.

    The vector reads no batch, so it moves once per update whatever the accumulation.
    The kernel in the layer stays as the optimizer left it: only the call divides it.

    Attributes:
      layer: Whatever has a `kernel`; its other parameters are used as they are.
      vector: Right singular vector of the kernel, always float32 [outputs].

    >>> dense = SpectralNorm(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    >>> for _ in range(20):
    ...     y = dense(jnp.eye(3))         # each call knows the singular value better
    >>> round(float(jnp.linalg.norm(y, 2)), 4)
    1.0
    """

    def __init__(
        self,
        layer: nnx.Module,
        *,
        epsilon: float = 1e-12,
        rngs: nnx.Rngs,
    ) -> None:
        """Put a norm around a layer.

        Args:
          layer: The layer, `nnx.Linear` or `nnx.Conv` for example. All axes of its
            `kernel` but the last are the rows of a matrix.
          epsilon: Below what length a vector is not brought to length 1.
          rngs: Random keys for the first vector.

        Raises:
          ArgumentError: The layer has no parameter `kernel`.
        """
        check_number("epsilon", epsilon)
        kernel = getattr(layer, "kernel", None)
        if not isinstance(kernel, nnx.Param):
            raise ArgumentError(
                f"`layer` must have a parameter `kernel`, got `{type(layer).__name__}`. "
                "Use `nnx.Linear` on one-hot labels in the place of `nnx.Embed`."
            )
        outputs = kernel[...].shape[-1]
        vector = jax.random.normal(rngs.params(), (outputs,), jnp.float32)
        self.layer = layer
        self.vector = nnx.BatchStat(_unit(vector, epsilon))
        self.epsilon = epsilon
        self.use_running_average = False  # what `train()` and `eval()` set

    def __call__(self, *args: Any) -> Any:
        """Call the layer with its weight divided.

        Args:
          *args: What the layer takes.

        Returns:
          What it makes of it.
        """
        layer: Any = nnx.clone(self.layer)  # whose own kernel is left alone
        kernel = layer.kernel[...]
        matrix = kernel.reshape(-1, kernel.shape[-1])
        matrix = matrix.astype(wider_dtype(matrix.dtype, self.vector[...].dtype))
        fixed = lax.stop_gradient(matrix)
        left = _unit(fixed @ self.vector[...], self.epsilon)
        right = _unit(left @ fixed, self.epsilon)
        if not self.use_running_average:
            self.vector.set_value(right.astype(self.vector[...].dtype))
        sigma = left @ matrix @ right
        sigma = jnp.where(sigma > 0, sigma, 1)  # a kernel of zeros stays
        divided = (matrix / sigma).reshape(kernel.shape).astype(kernel.dtype)
        layer.kernel.set_value(divided)
        return layer(*args)


def _unit(x: Float[Array, "n"], epsilon: float) -> Float[Array, "n"]:
    return x * lax.rsqrt(jnp.maximum(x @ x, epsilon**2))


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


def params_of(model: nnx.Module) -> PyTree:
    """Take the parameters out of a model: what an optimizer is for.

    Args:
      model: Any module.

    Returns:
      Its `nnx.Param` arrays in nested dicts, named as the module's attributes.

    Raises:
      ArgumentError: `model` is no module.

    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> jax.tree.map(jnp.shape, params_of(model))
    {'bias': (2,), 'kernel': (3, 2)}
    """
    _check_module(model)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_params(model: Model, params: PyTree) -> Model:
    """Copy a model with other parameters; statistics and the rest stay.

    Args:
      model: Any module.
      params: Arrays as `params_of` names them: updated ones, or an average.

    Returns:
      The copy; `model` keeps its own.

    Raises:
      ArgumentError: `model` is no module, or `params` are those of another.

    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> zero = with_params(model, jax.tree.map(jnp.zeros_like, params_of(model)))
    >>> float(zero(jnp.ones(3)).sum())
    0.0
    """
    _check_module(model)
    graphdef, own, rest = nnx.split(model, nnx.Param, ...)
    given = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    named = dict(named_leaves(nnx.to_pure_dict(own))).keys()
    found = dict(named_leaves(given)).keys()
    if odd := sorted(named ^ found):
        raise ArgumentError(
            "`params` must be named as in `params_of(model)`, got others: "
            f"`{odd[0]}` is {'missing' if odd[0] in named else 'new'}. Pass what "
            "`optax.apply_updates` made of them."
        )
    return nnx.merge(graphdef, params, rest, copy=True)


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[tuple[Any, Any], PyTree]]:
    """Differentiate a loss with respect to the parameters of its first argument.

    The loss may move the model (batch statistics, counts of random keys): it works on
    a copy. Other modules among its arguments are constants; clone one in the loss if
    it moves there.

    Args:
      loss_fn: `loss_fn(model, *args)` returns a loss, or `(loss, aux)`. A loss is a
        scalar, the mean over this replica's examples; or a `LocalSum`, which is exact
        where replicas have different numbers of them.
      has_aux: Whether it returns the latter.

    Returns:
      A function of the same arguments that returns `((loss, model), grads)` or
      `(((loss, aux), model), grads)`: the model as the loss left it, and gradients as
      `params_of` names parameters. Of a `LocalSum`, `loss` is a `Mean` to be reported
      as it is, and the gradient is for `update(..., count=loss.weight)`.

    Raises:
      ArgumentError: `loss_fn` is no function; or, later, its model no module.

    >>> def loss_fn(model, batch):
    ...     return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
    >>> def step_fn(state, batch):
    ...     (loss, model), grads = value_and_grad(loss_fn)(state["model"], batch)
    ...     params = params_of(model)
    ...     updates, opt = optimizer.update(grads, state["opt"], params)
    ...     model = with_params(model, optax.apply_updates(params, updates))
    ...     return {"model": model, "opt": opt}, {"loss": loss}
    """
    check_function("loss_fn", loss_fn)

    def value_and_grad_fn(model: nnx.Module, *args: Any) -> Any:
        _check_module(model)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def moving_loss(params: PyTree) -> tuple[Array, tuple[Any, Any, PyTree]]:
            copy = nnx.merge(graphdef, params, rest, copy=True)
            returned = loss_fn(copy, *args)
            loss, aux = returned if has_aux else (returned, None)
            moved = nnx.to_pure_dict(nnx.state(copy, nnx.Not(nnx.Param)))
            if not isinstance(loss, LocalSum):
                return loss, (loss, aux, moved)
            total, count = checked_sum(loss)
            return total, (as_mean(total, count), aux, moved)

        params = nnx.to_pure_dict(params)
        (_, (loss, aux, moved)), grads = jax.value_and_grad(moving_loss, has_aux=True)(
            params
        )
        value = (loss, aux) if has_aux else loss
        return (value, nnx.merge(graphdef, params, moved, copy=True)), grads

    return value_and_grad_fn


def _check_module(model: object) -> None:
    # NNX takes lists and dicts of modules, too, and whatever is built of them.
    if model is None or isinstance(model, jax.Array | int | float | str):
        raise ArgumentError(
            f"`model` must be a module of flax NNX, got `{type(model).__name__}`. Pass "
            "the one that the state holds."
        )
