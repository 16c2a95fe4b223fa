"""Problems that tests compile, in a file of their own."""

import ctypes
import os
import time

import jax
import jax.numpy as jnp
import optax

BATCH = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}


def problem(rep):
    tx = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        params = {"w": jax.random.normal(key, (64, 64))}
        return {"params": params, "opt": tx.init(params)}

    def step_fn(state, batch):
        def loss_fn(params):
            return jnp.mean((batch["x"] @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return step_fn, init_fn, BATCH


def reads_data(rep):
    with open("no/such/images.npz", "rb") as file:
        return file.read()


def returns_a_dataset(rep):
    step_fn, init_fn, batch = problem(rep)
    return step_fn, init_fn, iter([batch])


def takes_data(rep, dataset):
    return dataset


def never_ends(rep):
    time.sleep(1000)


def aborts(rep):
    os.abort()


def prints(rep):
    print("a line of the user's")
    os.write(1, b"and one past Python\n")
    return problem(rep)


HELD = ctypes.pointer(ctypes.c_int())


def cannot_be_pickled(rep):
    step_fn, init_fn, batch = problem(rep)
    held = HELD

    def holding(state, batch):
        assert held is not None
        return step_fn(state, batch)

    return holding, init_fn, batch
