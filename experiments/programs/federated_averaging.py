"""Train one network on data that stays where it is, and is unlike from place to place.

    server ── update(params, round) ──▶ three of the ten clients, drawn anew each round
           ◀── params, examples ──────

Each client holds digits of few kinds (shares of each class are drawn from a Dirichlet
distribution), takes some steps of its own on them, and returns its parameters, never an
example. The server averages these, weighted by how many examples each client has.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-
Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017 (Algorithm 1,
with a number of steps in place of epochs). Unlike shards: T.-M. H. Hsu, H. Qi and M.
Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator.launchpad_bridge as lp
from experiments.digits import NUM_CLASSES, digits_arrays
from experiments.programs import launch_flag
from replicator.base.types import PyTree

Examples: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Images, float32 [n, 64], and labels, int32 [n]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federation:
    """Settings of the clients and their training.

    Attributes:
      clients: All there are.
      sampled: How many work in one round.
      rounds: Averages that are made.
      local_steps: Steps of a client in a round.
      batch: Its examples in a step.
      rate: Of a step.
      alpha: Of the Dirichlet distribution; the smaller, the more unlike.
      seed: Of all that is drawn.
    """

    clients: int = 10
    sampled: int = 3
    rounds: int = 60
    local_steps: int = 20
    batch: int = 32
    rate: float = 0.3
    alpha: float = 0.1
    seed: int = 0


def cut_unlike(examples: Examples, federation: Federation) -> list[Examples]:
    """Return a shard for each client: of each class, shares as Dirichlet draws them."""
    images, labels = examples
    rng = np.random.default_rng((0, federation.seed))
    owners = np.empty(len(labels), int)
    for label in range(NUM_CLASSES):
        own = np.flatnonzero(labels == label)
        shares = rng.dirichlet([federation.alpha] * federation.clients)
        owners[own] = rng.choice(federation.clients, size=len(own), p=shares)
    # Who got nothing gets one example: everybody can be asked.
    for client in set(range(federation.clients)) - set(owners.tolist()):
        owners[client] = client
    return [
        (images[owners == client], labels[owners == client])
        for client in range(federation.clients)
    ]


def first_params(seed: int) -> PyTree:
    """Return a network with one hidden layer, not trained."""
    rng = np.random.default_rng((1, seed))
    return {
        "w1": rng.normal(scale=1 / 8, size=(64, 64)).astype(np.float32),
        "b1": np.zeros(64, np.float32),
        "w2": rng.normal(scale=1 / 8, size=(64, NUM_CLASSES)).astype(np.float32),
        "b2": np.zeros(NUM_CLASSES, np.float32),
    }


def logits_of(params: PyTree, images: jax.Array) -> jax.Array:
    """Return logits [n, 10] of images [n, 64]."""
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def accuracy(params: PyTree, examples: Examples) -> float:
    """Return the share of the examples that is read right."""
    images, labels = examples
    return float(
        np.mean(np.argmax(logits_of(params, jnp.asarray(images)), axis=1) == labels)
    )


@jax.jit
def descend(
    params: PyTree, images: jax.Array, labels: jax.Array, rate: jax.Array
) -> PyTree:
    """Take one step for each of the batches: images [steps, batch, 64]."""

    def loss_fn(params: PyTree, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
        grads = jax.grad(loss_fn)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), None

    return jax.lax.scan(step, params, (images, labels))[0]


class Client:
    """Holds examples that nobody else sees."""

    def __init__(self, number: int, examples: Examples, federation: Federation) -> None:
        self._number = number
        self._images, self._labels = examples
        self._federation = federation

    def update(self, params: PyTree, round_: int) -> tuple[PyTree, int]:
        """Return the parameters after some steps of its own, and its examples."""
        options = self._federation
        rng = np.random.default_rng((2, options.seed, self._number, round_))
        size = options.local_steps, options.batch
        drawn = rng.integers(len(self._labels), size=size)
        params = descend(
            params,
            jnp.asarray(self._images[drawn]),
            jnp.asarray(self._labels[drawn]),
            jnp.float32(options.rate),
        )
        return jax.device_get(params), len(self._labels)


class Server:
    """Holds the parameters, and the test set."""

    def __init__(
        self,
        clients: Sequence[lp.CourierClient],
        test: Examples,
        federation: Federation,
    ) -> None:
        self._clients = clients
        self._test = test
        self._federation = federation

    def run(self) -> dict[str, Any]:
        """Return the parameters; by round, who worked and how well it then reads."""
        options = self._federation
        rng = np.random.default_rng((3, options.seed))
        params = first_params(options.seed)
        sampled, accuracies = [], []
        for round_ in range(options.rounds):
            who = rng.choice(len(self._clients), size=options.sampled, replace=False)
            calls = [self._clients[i].futures.update(params, round_) for i in who]
            params = weighted_mean([call.result() for call in calls])
            sampled.append(sorted(who.tolist()))
            accuracies.append(accuracy(params, self._test))
        lp.stop()
        return {"params": params, "sampled": sampled, "accuracies": accuracies}


def weighted_mean(updates: Sequence[tuple[PyTree, int]]) -> PyTree:
    """Return the mean of parameters, each weighted by its number of examples."""
    total = sum(count for _, count in updates)
    weights = [np.float32(count / total) for _, count in updates]

    def mean(*leaves: np.ndarray) -> np.ndarray:
        return sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))  # type: ignore

    return jax.tree.map(mean, *[params for params, _ in updates])


def federate(
    launch_type: str | lp.Launcher,
    train: Examples,
    test: Examples,
    federation: Federation,
) -> dict[str, Any]:
    """Run the program; return what the server returns."""
    program = lp.Program("federated_averaging")
    with program.group("clients"):
        clients = [
            program.add_node(lp.CourierNode(Client, number, shard, federation))
            for number, shard in enumerate(cut_unlike(train, federation))
        ]
    server = lp.PyClassNode(Server, clients, test, federation)
    program.add_node(server, label="server")
    with lp.launch(program, launch_type) as run:
        run.wait()
        return run.results["server"]


def train_alone(shard: Examples, federation: Federation) -> PyTree:
    """Return what a client comes to by itself, in as many steps: for comparison."""
    client, params = Client(0, shard, federation), first_params(federation.seed)
    for round_ in range(federation.rounds):
        params, _ = client.update(params, round_)
    return params


def main(launch_type: str) -> None:
    train, test = digits_arrays("train"), digits_arrays("test")
    federation = Federation()
    shards = cut_unlike(train, federation)
    found = federate(launch_type, train, test, federation)
    alone = max(accuracy(train_alone(shard, federation), test) for shard in shards)
    kinds = [len(np.unique(labels)) for _, labels in shards]
    print(
        f"{federation.clients} clients, each with {min(kinds)} to {max(kinds)} kinds "
        f"of digits; after {federation.rounds} rounds of {federation.sampled} clients "
        f"{found['accuracies'][-1]:.1%} of {len(test[1])} other digits are read right, "
        f"{alone:.1%} by the best client alone"
    )


if __name__ == "__main__":
    launch_flag.run(main)
