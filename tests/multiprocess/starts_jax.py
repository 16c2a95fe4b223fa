"""Starts the backend of JAX when it is imported, as some scripts do."""

import jax.numpy as jnp

ONE = jnp.ones(())
