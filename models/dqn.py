"""DQN: a network learns the values of discrete actions, off policy.

Double Q-learning (van Hasselt et al. 2016, "Deep reinforcement learning with double
Q-learning"): of the next actions the learning network chooses, and the target network
values. Values are those of a state plus each action's advantage (Wang et al. 2016,
"Dueling network architectures for deep reinforcement learning", equation 9): the two
heads of `ActorCritic`, whose networks for images are used as they are. Environments
explore apart as in Horgan et al. 2018, "Distributed prioritized experience replay", §4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from models.d4pg import Losses
from models.dense import Params
from models.impala import ActorCritic
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dqn:
    """Values of actions; what they are made of, without their parameters.

    Attributes:
      network: One of two heads, without memory.
      epsilon: Probability of a random action in the first environment.
      alpha: By how much less the others explore: environment i of N by a probability of
        epsilon^(1 + alpha i / (N - 1)), and one alone as the middle one of many.

    Raises:
      ArgumentError: `epsilon` is no probability, or the network has a memory.

    >>> net = Dqn(network=ActorCritic(num_actions=3, torso="mlp", hidden=32))
    >>> params = net.init(jax.random.key(0), (10, 5))
    >>> net.best(params, jnp.zeros((4, 10, 5))).shape
    (4,)
    """

    network: ActorCritic
    epsilon: float = 0.4
    alpha: float = 7.0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ArgumentError(
                f"`epsilon` must be from 0 to 1, got {self.epsilon}. Use 0.4."
            )
        if self.network.lstm:
            raise ArgumentError(
                "`network` must have no memory, as transitions are drawn alone, got "
                f"lstm={self.network.lstm}. Use `lstm=0`."
            )

    @property
    def action_size(self) -> int:
        """Number of actions."""
        return self.network.num_actions

    def init(self, key: Array, observation_shape: tuple[int, ...]) -> Params:
        """Make untrained parameters."""
        return self.network.init(key, observation_shape)

    def initial_core(self, n: int) -> tuple[()]:
        """Return the recurrent state of n environments: none."""
        del n
        return ()

    def values(
        self, params: Params, observation: Shaped[Array, "n ..."]
    ) -> Float[Array, "n actions"]:
        """Return the expected discounted return after each action."""
        first = jnp.zeros(observation.shape[0], bool)  # what a memory would need
        heads, _ = self.network.step(params, observation, first, ())
        advantage = heads.logits - heads.logits.mean(-1, keepdims=True)
        return heads.value[:, None] + advantage

    def best(
        self, params: Params, observation: Shaped[Array, "n ..."]
    ) -> Int[Array, "n"]:
        """Return the actions of the greatest value, int32."""
        return self.values(params, observation).argmax(-1).astype(jnp.int32)

    def epsilons(self, n: int) -> Float[Array, "n"]:
        """Return the probability of a random action in each of n environments."""
        place = jnp.linspace(0.0, 1.0, n) if n > 1 else jnp.full(1, 0.5)
        return self.epsilon ** (1 + self.alpha * place)

    def act(
        self,
        params: Params,
        observation: Shaped[Array, "n ..."],
        first: Bool[Array, "n"],
        core: tuple[()],
        key: Array,
    ) -> tuple[Int[Array, "n"], dict[str, Array], tuple[()]]:
        """Return the best actions, some of them random; no extras, and no state."""
        n = len(first)
        whether, which = jax.random.split(key)
        explores = jax.random.uniform(whether, (n,)) < self.epsilons(n)
        chance = jax.random.randint(which, (n,), 0, self.action_size)
        return jnp.where(explores, chance, self.best(params, observation)), {}, core

    def losses(
        self, params: Params, target: Params, rows: dict[str, Array], keys: Array
    ) -> Losses:
        """Return what is learned from transitions; see `D4pg.losses`.

        Args:
          params: That learn.
          target: Older ones.
          rows: As `n_step` makes them; actions int32 [n].
          keys: Random key of each, [n]; not used.

        Returns:
          The Huber loss of the error of the action's value; the priority is the error's
          size.
        """
        del keys
        after = rows["next_observation"]
        chosen = self.best(params, after)
        value = _of(self.values(target, after), chosen)
        aim = jax.lax.stop_gradient(rows["reward"] + rows["discount"] * value)
        found = _of(self.values(params, rows["observation"]), rows["action"])
        priority = jax.lax.stop_gradient(jnp.abs(aim - found))
        return Losses(optax.losses.huber_loss(found, aim), priority, {"value": found})


def _of(
    values: Float[Array, "n actions"], action: Int[Array, "n"]
) -> Float[Array, "n"]:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]
