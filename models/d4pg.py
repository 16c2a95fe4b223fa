"""D4PG: a policy that follows the gradient of a critic of whole distributions.

Barth-Maron et al. 2018, "Distributed distributional deterministic policy gradients",
§3: the critic returns probabilities of atoms between v_min and v_max, and learns those
that its target assigns to n steps of reward and what comes after (Bellemare et al.
2017, "A distributional perspective on reinforcement learning", algorithm 1). `rlax`
projects them.

Actions are in [-1, 1]. Networks are those of `models.dense`: functions are pure, and
parameters nested dicts.
"""

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.dense import Params, norm_mlp, norm_mlp_init
from replicator.errors import ArgumentError, check_count

with warnings.catch_warnings():
    # rlax 0.1.9 imports distrax and that tensorflow_probability, which asks jax for
    # names that jax calls deprecated: a warning at import, of nothing that is used.
    warnings.simplefilter("ignore")
    import rlax


class Losses(NamedTuple):
    """What an agent with a critic learns of each of n transitions.

    Attributes:
      loss: Whose mean is descended, [n].
      priority: At least 0, the more is to be learnt, the greater, [n].
      metrics: Other numbers of each, [n], by name.
    """

    loss: Float[Array, "n"]
    priority: Float[Array, "n"]
    metrics: dict[str, Float[Array, "n"]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class D4pg:
    """Policy and critic; what they are made of, without their parameters.

    Attributes:
      action_size: Dimensions of an action.
      v_min: Lowest return that the critic knows.
      v_max: Highest.
      atoms: Returns from the one to the other.
      hidden: Features of each layer.
      noise: Standard deviation of what is added to actions, on average over
        environments; each has its own, from half of it to one and a half. One alone
        has another at each step, so that actors of one explore apart, too.

    Raises:
      ArgumentError: A number breaks its rule.

    >>> net = D4pg(action_size=2, v_min=0.0, v_max=10.0, hidden=32)
    >>> params = net.init(jax.random.key(0), (3,))
    >>> net.best(params, jnp.zeros((4, 3))).shape
    (4, 2)
    """

    action_size: int
    v_min: float
    v_max: float
    atoms: int = 51
    hidden: int = 256
    noise: float = 0.2

    def __post_init__(self) -> None:
        for name in ("action_size", "hidden"):
            check_count(name, getattr(self, name))
        check_count("atoms", self.atoms, "Use 51.", least=2)
        if not self.v_min < self.v_max:
            raise ArgumentError(
                f"`v_max` must be above `v_min`, got {self.v_max} and {self.v_min}. "
                "Use the least and the greatest return."
            )

    def init(self, key: Array, observation_shape: tuple[int, ...]) -> Params:
        """Make untrained parameters, for observations of one dimension."""
        (size,) = observation_shape
        policy, critic = jax.random.split(key)
        both = size + self.action_size
        return {
            "policy": norm_mlp_init(policy, size, self.hidden, self.action_size),
            "critic": norm_mlp_init(critic, both, self.hidden, self.atoms),
        }

    def initial_core(self, n: int) -> tuple[()]:
        """Return the recurrent state of n environments: none."""
        del n
        return ()

    def best(
        self, params: Params, observation: Float[Array, "n d"]
    ) -> Float[Array, "n a"]:
        """Return the policy's actions."""
        return jnp.tanh(norm_mlp(params["policy"], observation))

    def act(
        self,
        params: Params,
        observation: Float[Array, "n d"],
        first: Bool[Array, "n"],
        core: tuple[()],
        key: Array,
    ) -> tuple[Float[Array, "n a"], dict[str, Array], tuple[()]]:
        """Return the policy's actions with noise, no extras, and no state."""
        n = len(first)
        share = jnp.linspace(0.5, 1.5, n)
        if n == 1:
            alone = jax.random.fold_in(key, 1)
            share = jax.random.uniform(alone, (1,), minval=0.5, maxval=1.5)
        noise = (
            self.noise * share[:, None] * jax.random.normal(key, (n, self.action_size))
        )
        action = jnp.clip(self.best(params, observation) + noise, -1.0, 1.0)
        return action, {}, core

    def critic(
        self,
        params: Params,
        observation: Float[Array, "n d"],
        action: Float[Array, "n a"],
    ) -> Float[Array, "n atoms"]:
        """Return the logits of returns."""
        seen = jnp.concatenate([observation, action], axis=-1)
        return norm_mlp(params["critic"], seen)

    def support(self) -> Float[Array, "atoms"]:
        """Return the returns that logits are of."""
        return jnp.linspace(self.v_min, self.v_max, self.atoms)

    def losses(
        self, params: Params, target: Params, rows: dict[str, Array], keys: Array
    ) -> Losses:
        """Return what is learned from transitions.

        Args:
          params: That learn.
          target: Older ones.
          rows: As `n_step` makes them.
          keys: Random key of each, [n]; not used.

        Returns:
          The cross entropy of the critic minus the value of the policy's action, whose
          gradient reaches the policy alone; the priority is the critic's divergence.
        """
        del keys
        returns = self.support()
        aim = jax.lax.stop_gradient(self._target(target, rows))
        logits = self.critic(params, rows["observation"], rows["action"])
        cross = -jnp.sum(aim * jax.nn.log_softmax(logits), axis=-1)
        entropy = jax.scipy.special.entr(aim).sum(axis=-1)
        fixed = {"critic": jax.lax.stop_gradient(params["critic"])}
        action = self.best(params, rows["observation"])
        found = jax.nn.softmax(self.critic(fixed, rows["observation"], action))
        value = found @ returns
        priority = jax.lax.stop_gradient(jnp.maximum(cross - entropy, 0.0))
        return Losses(
            cross - value, priority, {"critic_loss": cross, "policy_value": value}
        )

    def _target(self, target: Params, rows: dict[str, Array]) -> Array:
        """Return the probabilities that the critic learns, [n, atoms]."""
        returns = self.support()
        after = rows["next_observation"]
        logits = self.critic(target, after, self.best(target, after))
        moved = rows["reward"][:, None] + rows["discount"][:, None] * returns[None]
        with jax.numpy_dtype_promotion("standard"):  # rlax multiplies floats by flags
            project = jax.vmap(rlax.categorical_l2_project, (0, 0, None))
            return jnp.asarray(project(moved, jax.nn.softmax(logits), returns))
