"""SAC: a policy of much entropy, that follows the lower of two critics.

Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", §4 to §6, with
the temperature learned. Actions are in [-1, 1], and so densities and the entropy that
is aimed at are those of that cube: its dimensions, below 0.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.d4pg import Losses
from models.dense import Params, mlp, mlp_init, norm_mlp, norm_mlp_init
from replicator.errors import check_count

_LOG_STD = (-5.0, 2.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sac:
    """Policy and critics; what they are made of, without their parameters.

    Attributes:
      action_size: Dimensions of an action.
      hidden: Features of each layer.
      is_normed: Whether first layers are normalised, as those of D4PG; the paper's are
        not, and cost less.

    Raises:
      ArgumentError: A number is below 1.

    >>> net = Sac(action_size=2, hidden=32)
    >>> params = net.init(jax.random.key(0), (3,))
    >>> net.best(params, jnp.zeros((4, 3))).shape
    (4, 2)
    """

    action_size: int
    hidden: int = 256
    is_normed: bool = True

    def __post_init__(self) -> None:
        for name in ("action_size", "hidden"):
            check_count(name, getattr(self, name))

    def init(self, key: Array, observation_shape: tuple[int, ...]) -> Params:
        """Make untrained parameters, for observations of one dimension."""
        (size,) = observation_shape
        policy, *critics = jax.random.split(key, 3)
        both = size + self.action_size
        init = norm_mlp_init if self.is_normed else mlp_init
        return {
            "policy": init(policy, size, self.hidden, 2 * self.action_size),
            "critics": [init(key, both, self.hidden, 1) for key in critics],
            "log_temperature": jnp.zeros(()),
        }

    def initial_core(self, n: int) -> tuple[()]:
        """Return the recurrent state of n environments: none."""
        del n
        return ()

    def best(
        self, params: Params, observation: Float[Array, "n d"]
    ) -> Float[Array, "n a"]:
        """Return the actions in the middle of the policy."""
        return jnp.tanh(self._policy(params, observation)[0])

    def act(
        self,
        params: Params,
        observation: Float[Array, "n d"],
        first: Bool[Array, "n"],
        core: tuple[()],
        key: Array,
    ) -> tuple[Float[Array, "n a"], dict[str, Array], tuple[()]]:
        """Draw actions of the policy; no extras, and no state."""
        noise = jax.random.normal(key, (len(first), self.action_size))
        return self.drawn(params, observation, noise)[0], {}, core

    def drawn(
        self,
        params: Params,
        observation: Float[Array, "n d"],
        noise: Float[Array, "n a"],
    ) -> tuple[Float[Array, "n a"], Float[Array, "n"]]:
        """Return the actions that normal noise draws, and the logs of their densities.

        The latter by log(1 - tanh(u)²) = 2 (log 2 - u - softplus(-2 u)), which is right
        also where tanh(u) rounds to 1.
        """
        mean, log_std = self._policy(params, observation)
        u = mean + jnp.exp(log_std) * noise
        log_normal = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), (log_normal - log_slope).sum(axis=-1)

    def losses(
        self, params: Params, target: Params, rows: dict[str, Array], keys: Array
    ) -> Losses:
        """Return what is learned from transitions; see `D4pg.losses`.

        Args:
          params: That learn.
          target: Older ones, of the critics.
          rows: As `n_step` makes them.
          keys: Random key of each, [n].

        Returns:
          The sum of the losses of policy, critics and temperature, each of which
          reaches its own parameters alone; the priority is the critics' error.
        """
        draw = jax.vmap(lambda key: jax.random.normal(key, (2, self.action_size)))
        noise = draw(keys)
        temperature = jax.lax.stop_gradient(jnp.exp(params["log_temperature"]))
        after = rows["next_observation"]
        following, log_following = self.drawn(params, after, noise[:, 0])
        value = self._lower(target, after, following) - temperature * log_following
        aim = jax.lax.stop_gradient(rows["reward"] + rows["discount"] * value)
        found = self._both(params, rows["observation"], rows["action"])
        error = found - aim[None]
        fixed = {"critics": jax.lax.stop_gradient(params["critics"])}
        action, log_action = self.drawn(params, rows["observation"], noise[:, 1])
        gain = self._lower(fixed, rows["observation"], action)
        surplus = jax.lax.stop_gradient(log_action) - self.action_size
        critic_loss = 0.5 * jnp.square(error).sum(axis=0)
        loss = (
            critic_loss
            + temperature * log_action
            - gain
            - params["log_temperature"] * surplus
        )
        metrics = {
            "critic_loss": critic_loss,
            "policy_value": gain,
            "entropy": -log_action,
        }
        priority = jax.lax.stop_gradient(jnp.abs(error).mean(axis=0))
        return Losses(loss, priority, metrics)

    def _policy(
        self, params: Params, observation: Array
    ) -> tuple[Float[Array, "n a"], Float[Array, "n a"]]:
        """Return the mean, and the log of the deviation, before tanh."""
        found = self._net(params["policy"], observation)
        mean, log_std = jnp.split(found, 2, axis=-1)
        return mean, jnp.clip(log_std, *_LOG_STD)

    def _both(
        self, params: Params, observation: Array, action: Array
    ) -> Float[Array, "2 n"]:
        seen = jnp.concatenate([observation, action], axis=-1)
        return jnp.stack([self._net(each, seen)[:, 0] for each in params["critics"]])

    def _net(self, params: Params, x: Float[Array, "n d"]) -> Float[Array, "n e"]:
        return (norm_mlp if self.is_normed else mlp)(params, x)

    def _lower(
        self, params: Params, observation: Array, action: Array
    ) -> Float[Array, "n"]:
        return self._both(params, observation, action).min(axis=0)
