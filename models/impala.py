"""The networks of IMPALA: pixels to a policy and a value, with memory if wanted.

Espeholt et al. 2018, "IMPALA: Scalable distributed deep-RL with importance weighted
actor-learner architectures", figure 3: the shallow one on the left, the deep residual
one on the right; without the language channel, and without the last reward and action
beside the features. A multilayer perceptron stands beside them for small problems.

Parameters are nested dicts of arrays, and functions are pure: the same parameters act
(`step`, one observation of each of n environments) and learn (`unroll`, whole
trajectories), and travel to actors as they are.

On a CPU two things make XLA's convolutions several times slower: a loop around them
(`lax.scan`), so there is none here; and temporary buffers of tens of megabytes, for
which the system finds new pages at every call. `chunk` cuts the latter.
"""

import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from models.dense import Params, dense, dense_init
from replicator.errors import ArgumentError, check_count, check_flags, check_whole

Core: TypeAlias = Any
"""Recurrent state: (hidden, cell), each [n, size]; () without memory."""

_SHALLOW = ((16, 8, 4), (32, 4, 2))  # channels, kernel, stride
_DEEP = (16, 32, 32)  # channels of each section
_RESIDUAL_BLOCKS = 2
_CONTRAST = 64.0  # of pixels from 0 to 255


class Heads(NamedTuple):
    """Outputs of a network for observations.

    Attributes:
      logits: Unnormalised log-probabilities of actions, float32 [..., actions].
      value: Expected discounted return, float32 [...].
    """

    logits: Float[Array, "*rows actions"]
    value: Float[Array, "*rows"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActorCritic:
    """A network of actions and values; what it is made of, without its parameters.

    Attributes:
      num_actions: How many actions there are.
      torso: `"shallow"` (2 convolutions) or `"deep"` (15, residual) for images of
        [height, width, channels] with values from 0 to 255; `"mlp"` for
        anything else.
      hidden: Features after the torso.
      lstm: Units of an LSTM behind them; 0 for none.
      chunk: Images that convolutions take at once, at most; 0 for all of them. On a CPU
        16 learn from 32 trajectories of 20 steps in half the CPU time; an accelerator
        wants 0.
      channels_first: Whether images are [channels, height, width], as Atari's emulator
        stacks its frames; it costs nothing.

    Raises:
      ArgumentError: A number is below its least, or there is no such torso.

    >>> net = ActorCritic(num_actions=3, torso="mlp", hidden=32)
    >>> params = net.init(jax.random.key(0), (10, 5))
    >>> observation, first = jnp.zeros((4, 10, 5)), jnp.ones(4, bool)
    >>> heads, core = net.step(params, observation, first, net.initial_core(4))
    >>> heads.logits.shape, heads.value.shape
    ((4, 3), (4,))
    """

    num_actions: int
    torso: str = "shallow"
    hidden: int = 256
    lstm: int = 0
    chunk: int = 0
    channels_first: bool = False

    def __post_init__(self) -> None:
        if self.torso not in _TORSOS:
            raise ArgumentError(
                f"`torso` must be one of {sorted(_TORSOS)}, got {self.torso!r}. "
                f"Use 'mlp' for what is no image."
            )
        check_count("num_actions", self.num_actions)
        check_count("hidden", self.hidden)
        check_flags(channels_first=self.channels_first)
        for name in ("lstm", "chunk"):
            value = getattr(self, name)
            check_whole(name, value)
            if value < 0:
                raise ArgumentError(f"`{name}` must be at least 0, got {value}. Use 0.")

    def init(self, key: Array, observation_shape: tuple[int, ...]) -> Params:
        """Make untrained parameters.

        Args:
          key: Random key.
          observation_shape: Of one observation: no batch, no time.

        Returns:
          Parameters, float32; those of the policy's head are near 0.
        """
        torso_key, hidden_key, lstm_key, policy_key, value_key = jax.random.split(
            key, 5
        )
        image = jnp.zeros((1, *observation_shape), jnp.uint8)
        seen = jax.eval_shape(self._seen, image).shape[1:]
        torso = _TORSOS[self.torso][0](torso_key, seen, self.hidden)
        features = jax.eval_shape(self._torso, torso, image).shape[-1]
        width = self.lstm or self.hidden
        params: Params = {
            "torso": torso,
            "hidden": dense_init(hidden_key, features, self.hidden),
            "policy": dense_init(policy_key, width, self.num_actions, scale=0.01),
            "value": dense_init(value_key, width, 1, scale=1.0),
        }
        if self.lstm:
            inputs = self.hidden + self.lstm
            params["lstm"] = dense_init(lstm_key, inputs, 4 * self.lstm, scale=1.0)
        return params

    def initial_core(self, n: int) -> Core:
        """Return the recurrent state of n environments before their first step."""
        if not self.lstm:
            return ()
        return jnp.zeros((n, self.lstm)), jnp.zeros((n, self.lstm))

    def step(
        self,
        params: Params,
        observation: Shaped[Array, "n ..."],
        first: Bool[Array, "n"],
        core: Core,
    ) -> tuple[Heads, Core]:
        """Look at one observation of each of n environments.

        Args:
          params: As `init` makes them.
          observation: The observations.
          first: Where an episode begins: its memory is emptied before.
          core: Recurrent state.

        Returns:
          The heads, leaves [n, ...], and the state after.
        """
        features = self._features(params, observation)
        if self.lstm:
            core = _lstm(params["lstm"], features, first, core)
            features = core[0]
        return self._heads(params, features), core

    def unroll(
        self,
        params: Params,
        observation: Shaped[Array, "b t ..."],
        first: Bool[Array, "b t"],
        core: Core,
    ) -> Heads:
        """Look at whole trajectories.

        Args:
          params: As `init` makes them.
          observation: b trajectories of t observations.
          first: Where an episode begins.
          core: Recurrent state before the first observation of each, leaves [b, ...].

        Returns:
          The heads, leaves [b, t, ...]: as `step` gives them one after the other.
        """
        rows = observation.shape[:2]
        flat = observation.reshape(-1, *observation.shape[2:])
        features = self._features(params, flat).reshape(*rows, -1)
        if self.lstm:

            def body(core: Core, inputs: tuple[Array, Array]) -> tuple[Core, Array]:
                core = _lstm(params["lstm"], *inputs, core)
                return core, core[0]

            inputs = (features.swapaxes(0, 1), first.swapaxes(0, 1))
            _, features = lax.scan(body, core, inputs)
            features = features.swapaxes(0, 1)
        return self._heads(params, features)

    def act(
        self,
        params: Params,
        observation: Shaped[Array, "n ..."],
        first: Bool[Array, "n"],
        core: Core,
        key: Array,
    ) -> tuple[Int[Array, "n"], dict[str, Array], Core]:
        """Draw an action of the policy for each of n environments.

        Args:
          params: As `init` makes them.
          observation: The observations.
          first: Where an episode begins.
          core: Recurrent state.
          key: Random key.

        Returns:
          Actions, int32; extras: the `logits` they were drawn from; the state after.
        """
        heads, core = self.step(params, observation, first, core)
        action = jax.random.categorical(key, heads.logits).astype(jnp.int32)
        return action, {"logits": heads.logits}, core

    def _features(self, params: Params, observation: Array) -> Array:
        torso = self._torso(params["torso"], observation)
        return jax.nn.relu(dense(params["hidden"], torso))

    def _torso(self, params: Params, observation: Array) -> Array:
        rows = observation.shape[0]
        size = self.chunk or rows
        parts = [observation[i : i + size] for i in range(0, rows, size)]
        return jnp.concatenate([self._convolved(params, part) for part in parts])

    def _convolved(self, params: Params, observation: Array) -> Array:
        x = _TORSOS[self.torso][1](params, self._seen(observation))
        return x.reshape(x.shape[0], -1)

    def _seen(self, observation: Array) -> Array:
        if self.torso == "mlp":
            return observation.astype(jnp.float32)
        if self.channels_first:
            observation = observation.transpose(0, 2, 3, 1)
        # Without its mean brightness: what moves in a game is a few small pixels, and
        # values are learnt sooner where the background does not outweigh them.
        image = observation.astype(jnp.float32)
        return (image - image.mean((1, 2), keepdims=True)) / _CONTRAST

    def _heads(self, params: Params, features: Array) -> Heads:
        logits = dense(params["policy"], features)
        return Heads(logits, dense(params["value"], features)[..., 0])


def _mlp_init(key: Array, shape: tuple[int, ...], width: int) -> Params:
    return {"dense": dense_init(key, math.prod(shape), width)}


def _mlp(params: Params, x: Array) -> Array:
    return jax.nn.relu(dense(params["dense"], x.reshape(x.shape[0], -1)))


def _shallow_init(key: Array, shape: tuple[int, ...], width: int) -> Params:
    del width
    params, channels = {}, shape[-1]
    for index, (out, kernel, _) in enumerate(_SHALLOW):
        conv_key = jax.random.fold_in(key, index)
        params[f"conv{index}"] = _conv_init(conv_key, kernel, channels, out)
        channels = out
    return params


def _shallow(params: Params, x: Array) -> Array:
    for index, (_, _, stride) in enumerate(_SHALLOW):
        x = jax.nn.relu(_conv(params[f"conv{index}"], x, stride, "VALID"))
    return x


def _deep_init(key: Array, shape: tuple[int, ...], width: int) -> Params:
    del width
    params, channels = {}, shape[-1]
    for section, out in enumerate(_DEEP):
        for index in range(1 + 2 * _RESIDUAL_BLOCKS):
            conv_key = jax.random.fold_in(jax.random.fold_in(key, section), index)
            name = f"section{section}_conv{index}"
            params[name] = _conv_init(conv_key, 3, channels, out)
            channels = out
    return params


def _deep(params: Params, x: Array) -> Array:
    for section in range(len(_DEEP)):
        convs = [
            params[f"section{section}_conv{index}"]
            for index in range(1 + 2 * _RESIDUAL_BLOCKS)
        ]
        x = _conv(convs[0], x, 1, "SAME")
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for first, second in zip(convs[1::2], convs[2::2], strict=True):
            y = _conv(first, jax.nn.relu(x), 1, "SAME")
            x = x + _conv(second, jax.nn.relu(y), 1, "SAME")
    return jax.nn.relu(x)


_TORSOS = {
    "shallow": (_shallow_init, _shallow),
    "deep": (_deep_init, _deep),
    "mlp": (_mlp_init, _mlp),
}


def _lstm(params: Params, x: Array, first: Array, core: Core) -> Core:
    """Make one step of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates)."""
    hidden, cell = (jnp.where(first[:, None], 0.0, part) for part in core)
    gates = dense(params, jnp.concatenate([x, hidden], axis=-1))
    take, forget, new, give = jnp.split(gates, 4, axis=-1)
    # +1: a new network remembers (Jozefowicz et al. 2015).
    cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
    return jax.nn.sigmoid(give) * jnp.tanh(cell), cell


def _conv_init(key: Array, kernel: int, inputs: int, outputs: int) -> Params:
    shape = (kernel, kernel, inputs, outputs)
    init = jax.nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
    return {"kernel": init(key, shape), "bias": jnp.zeros(outputs)}


def _conv(params: Params, x: Array, stride: int, padding: str) -> Array:
    y = lax.conv_general_dilated(
        x,
        params["kernel"],
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + params["bias"].reshape(1, 1, 1, -1)
