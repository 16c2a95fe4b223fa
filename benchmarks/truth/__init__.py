"""Training programs of many kinds, each against plain jax and optax on one device."""
