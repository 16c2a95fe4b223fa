"""Two players, two optimizers, one step: how every GAN here is trained and sampled.

A step moves the discriminator by its hinge loss and, at the same time, the generator by
its own, against the discriminator as it was: both gradients come before both updates,
so that a batch may be cut into microbatches. With several steps of the discriminator to
one of the generator, the others are `critic_step_fn`.

Running statistics and spectral norms move once per update.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import replicator
from models.gan_training import (
    check_truncation,
    draw,
    hinge_losses,
    orthogonal_penalty,
    warmed_decay,
)
from replicator.errors import check_count
from replicator.nnx import (
    params_of,
    value_and_grad,
    with_params,
    with_standing_statistics,
)

_CHUNK = 256  # images that are drawn at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gan:
    """Two players, their losses and optimizers.

    Attributes:
      make_generator: `make_generator(rngs=...)` returns an untrained generator: a
        module that makes images of latents and labels.
      make_discriminator: Likewise, a module that scores images and labels.
      generator_tx: Wrapped optimizer of the generator.
      discriminator_tx: Wrapped optimizer of the discriminator.
      latent: Size of a latent vector.
      num_classes: How many classes there are.
      decay: Of the average of the generator's parameters, which is sampled from; lower
        at first, so that nothing of the untrained generator stays in it.
      orthogonal: Weight of `orthogonal_penalty`; 0 for none.
    """

    make_generator: Callable[..., Any]
    make_discriminator: Callable[..., Any]
    generator_tx: optax.GradientTransformation
    discriminator_tx: optax.GradientTransformation
    latent: int
    num_classes: int
    decay: float = 0.999
    orthogonal: float = 0.0

    def init_fn(self, key: jax.Array) -> dict:
        """Make both players, their optimizers, and the average."""
        g_key, d_key = jax.random.split(key)
        generator = self.make_generator(rngs=nnx.Rngs(g_key))
        discriminator = self.make_discriminator(rngs=nnx.Rngs(d_key))
        params = params_of(generator)
        return {
            "generator": generator,
            "generator_opt": self.generator_tx.init(params),
            "average": jax.tree.map(jnp.copy, params),
            "averaged": jnp.zeros((), jnp.int32),
            "discriminator": discriminator,
            "discriminator_opt": self.discriminator_tx.init(params_of(discriminator)),
        }

    def step_fn(self, state: dict, batch: dict, key: jax.Array) -> tuple[dict, dict]:
        """Move both players."""
        d_key, g_key = jax.random.split(key)
        moved, metrics = self.critic_step_fn(state, batch, d_key)
        (loss, generator), grads = value_and_grad(self._generator_loss)(
            state["generator"], state["discriminator"], g_key, len(batch["image"])
        )
        generator, opt = _updated(
            self.generator_tx, generator, state["generator_opt"], grads
        )
        # Once per update, as the optimizer moves.
        past = warmed_decay(self.decay, state["averaged"])
        share = jnp.where(replicator.is_last_microbatch(), 1.0 - past, 0.0)
        average = jax.tree.map(
            lambda new, old: old + (new - old) * share.astype(old.dtype),
            params_of(generator),
            state["average"],
        )
        moved |= {"generator": generator, "generator_opt": opt, "average": average}
        moved["averaged"] = state["averaged"] + 1
        return moved, metrics | {"generator_loss": loss}

    def critic_step_fn(
        self, state: dict, batch: dict, key: jax.Array
    ) -> tuple[dict, dict]:
        """Move the discriminator alone."""
        (loss, discriminator), grads = value_and_grad(self._discriminator_loss)(
            state["discriminator"], state["generator"], batch, key
        )
        discriminator, opt = _updated(
            self.discriminator_tx, discriminator, state["discriminator_opt"], grads
        )
        moved = {"discriminator": discriminator, "discriminator_opt": opt}
        return state | moved, {"discriminator_loss": loss}

    def _discriminator_loss(
        self, discriminator: Any, generator: Any, batch: dict, key: jax.Array
    ) -> jax.Array:
        latents, labels = self.draw(key, len(batch["image"]))
        drawn = lax.stop_gradient(nnx.clone(generator)(latents, labels))
        # Together: the spectral norms move once.
        scores = discriminator(
            jnp.concatenate([batch["image"], drawn.astype(batch["image"].dtype)]),
            jnp.concatenate([batch["label"], labels]),
        )
        real, fake = jnp.split(scores, 2)
        return hinge_losses(real, fake).mean()

    def _generator_loss(
        self, generator: Any, discriminator: Any, key: jax.Array, n: int
    ) -> jax.Array:
        judge = nnx.clone(discriminator)
        judge.eval()
        latents, labels = self.draw(key, n)
        loss = -judge(generator(latents, labels), labels).mean()
        if self.orthogonal:
            loss += self.orthogonal * orthogonal_penalty(generator)
        return loss

    def samplers(
        self,
        rep: replicator.Replicator,
        state: dict,
        *,
        truncations: Sequence[float | None],
        batches: int,
        global_batch: int,
        seed: int = 0,
    ) -> list[Any]:
        """Return average generators whose norms have standing statistics.

        Latents are drawn by their place in the global batch, so that any number of
        replicas gives the same.

        Args:
          rep: Where batches are drawn.
          state: Of a run.
          truncations: Of the latents, for a generator each: statistics should know
            what is sampled.
          batches: That statistics are plain means over.
          global_batch: Images of a batch, of all replicas together.
          seed: Of the latents.

        Returns:
          Generators in `eval()` mode.

        Raises:
          ArgumentError: `batches` is below 1, or a truncation is out of its range.
          BatchError: `global_batch` does not divide evenly over replicas.
        """
        check_count("batches", batches)
        for truncation in truncations:
            check_truncation(truncation)
        average = with_params(state["generator"], state["average"])
        first = jax.device_get(with_standing_statistics(average))
        step = rep.compile(_seen)
        found = []
        for truncation in truncations:
            standing = rep.put(first)
            for key in jax.random.split(jax.random.key(seed), batches):
                latents, labels = self.draw(key, global_batch, truncation=truncation)
                standing, _ = step(standing, {"latents": latents, "labels": labels})
            found.append(jax.device_get(standing))
            found[-1].eval()
        return found

    def draw(
        self, key: jax.Array, n: int, *, truncation: float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return latents and labels, as `models.gan_training.draw`."""
        return draw(
            key,
            n,
            latent=self.latent,
            num_classes=self.num_classes,
            truncation=truncation,
        )


def _seen(generator: Any, batch: dict) -> tuple[Any, dict]:
    generator = nnx.clone(generator)
    generator(batch["latents"], batch["labels"])
    return generator, {}


def images_of(generator: Any, latents: Any, labels: Any) -> np.ndarray:
    """Draw images on one device, some at a time.

    Args:
      generator: In `eval()` mode.
      latents: [n, latent].
      labels: [n].

    Returns:
      Pixels from -1 to 1, float32 [n, height, width, channels].
    """
    parts = []
    for start in range(0, len(latents), _CHUNK):
        rows = slice(start, start + _CHUNK)
        parts.append(np.asarray(_images(generator, latents[rows], labels[rows])))
    return np.concatenate(parts)


def orders(
    gan: Gan, *, columns: int, seed: int, truncation: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return latents [classes, columns, latent] and each row's class."""
    count = gan.num_classes * columns
    latents, _ = gan.draw(jax.random.key(seed), count, truncation=truncation)
    classes = np.arange(gan.num_classes, dtype=np.int32)
    rows = np.asarray(latents).reshape(gan.num_classes, columns, -1)
    return rows, np.broadcast_to(classes[:, None], rows.shape[:2])


def rows_of(generator: Any, latents: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return images [rows, columns, …] of latents and labels [rows, columns, …]."""
    images = images_of(generator, latents.reshape(labels.size, -1), labels.ravel())
    return images.reshape(*labels.shape, *images.shape[1:])


@jax.jit
def _images(generator: Any, latents: jax.Array, labels: jax.Array) -> jax.Array:
    return nnx.clone(generator)(latents, labels)


def _updated(
    tx: optax.GradientTransformation, model: Any, opt: Any, grads: Any
) -> tuple[Any, Any]:
    params = params_of(model)
    updates, opt = tx.update(grads, opt, params)
    return with_params(model, optax.apply_updates(params, updates)), opt
