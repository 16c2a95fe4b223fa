"""Let many actors ask one policy; what they ask at the same time is one batch.

    actors/0 … actors/3 ── act(image) ──▶ policy: up to 32 calls, one matrix product

Each call brings one image and gets one answer. The server merges those that arrive
together, pads them to one shape, so that the function is compiled once, and calls it
once. The policy is a network that was trained, here and now, to read digits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator.launchpad_bridge as lp
from experiments.digits import NUM_CLASSES, digits_arrays
from experiments.programs import launch_flag
from replicator.base.types import PyTree

BATCH = 32


def logits_of(params: PyTree, images: jax.Array) -> jax.Array:
    """Return logits [n, 10] of images [n, 64]."""
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def train(images: np.ndarray, labels: np.ndarray, *, steps: int = 200) -> PyTree:
    """Return parameters that read these digits; takes a second or two."""
    keys = jax.random.split(jax.random.key(0))
    params: PyTree = {
        "w1": jax.random.normal(keys[0], (images.shape[1], 64)) / 8,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, NUM_CLASSES)) / 8,
        "b2": jnp.zeros(NUM_CLASSES),
    }
    optimizer = optax.sgd(0.5, momentum=0.9)

    def loss_fn(params: PyTree) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits_of(params, jnp.asarray(images)), jnp.asarray(labels)
        )
        return losses.mean()

    @jax.jit
    def step(params: PyTree, state: optax.OptState) -> tuple[PyTree, optax.OptState]:
        updates, state = optimizer.update(jax.grad(loss_fn)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return jax.device_get(params)  # arrays of NumPy travel to any process


class Policy:
    """Answers in batches, and counts them."""

    def __init__(self, params: PyTree) -> None:
        self._act = functools.partial(jax.jit(logits_of), params)
        self._act(np.zeros((BATCH, len(params["w1"])), np.float32))  # compiles
        self._batches = 0

    @lp.batched_handler(batch_size=BATCH, timeout=0.01, pad_batch=True)
    def act(self, images: np.ndarray) -> np.ndarray:
        """Return logits of an image [64]; here they are images [BATCH, 64]."""
        self._batches += 1  # one batch at a time: `max_parallelism` is 1
        return np.asarray(self._act(images))

    def batches(self) -> int:
        """Return how many batches there were."""
        return self._batches


class Actor:
    """Has several images before it at a time, as it would have environments."""

    def __init__(
        self, policy: lp.CourierClient, images: np.ndarray, side_by_side: int
    ) -> None:
        self._policy = policy
        self._images = images
        self._side_by_side = side_by_side

    def run(self) -> np.ndarray:
        """Return logits [n, 10] of its images."""
        answers = []
        for first in range(0, len(self._images), self._side_by_side):
            images = self._images[first : first + self._side_by_side]
            calls = [self._policy.futures.act(image) for image in images]
            answers += [call.result() for call in calls]
        return np.stack(answers)


def serve(
    launch_type: str | lp.Launcher,
    params: PyTree,
    images: np.ndarray,
    *,
    actors: int = 4,
    side_by_side: int = 8,
) -> dict[str, Any]:
    """Run the program; return logits [n, 10] of the images, and the batches it took."""
    program = lp.Program("inference_server")
    # A call that waits for others holds a thread: a full batch needs as many.
    node = lp.CourierNode(Policy, params, courier_kwargs={"thread_pool_size": BATCH})
    policy = program.add_node(node, label="policy")
    with program.group("actors"):
        for share in np.array_split(images, actors):
            program.add_node(lp.PyClassNode(Actor, policy, share, side_by_side))
    with lp.launch(program, launch_type) as run:
        run.wait(labels=["actors"])
        answers = run.results_of("actors")
        batches = policy.dereference().batches()
    return {"logits": np.concatenate(answers), "batches": batches}


def main(launch_type: str) -> None:
    params = train(*digits_arrays("train"))
    images, labels = digits_arrays("test")
    found = serve(launch_type, params, images)
    alone = np.stack([logits_of(params, image[None])[0] for image in images])
    right = np.mean(found["logits"].argmax(axis=1) == labels)
    apart = np.abs(found["logits"] - alone).max()
    print(
        f"{len(images)} calls in {found['batches']} batches; {right:.1%} of the digits "
        f"read right; answers one by one differ by at most {apart:.0e}"
    )


if __name__ == "__main__":
    launch_flag.run(main)
