"""What the processes of a test run: they import this file."""

import jax
import numpy as np

from replicator.compat import jax as old_jax
from replicator.compat import jax_utils


def mapped():
    """Map over the devices of all processes; return what this one is handed back."""
    rank, here = jax.process_index(), jax.local_device_count()
    own = rank * here + np.arange(here, dtype=np.float32)
    total = old_jax.pmap(lambda x: (x, jax.lax.psum(x, "i")), "i")
    rows, sums = total(own)
    again, _ = total(rows)  # what it returned is what it takes
    weights = jax_utils.replicate({"w": np.float32(3)})
    step = old_jax.pmap(
        lambda w, x: jax.tree.map(lambda w: w + jax.lax.pmean(x, "i"), w),
        "i",
        donate_argnums=0,
    )
    for _ in range(20):
        weights = step(weights, own)
    whole = old_jax.pmap(
        lambda x, scale: jax.lax.pmean(x * scale, "i"),
        "i",
        in_axes=(0, None),
        out_axes=None,
    )
    keys = old_jax.pmap(lambda k: jax.random.fold_in(k, jax.lax.axis_index("i")), "i")(
        jax_utils.replicate(jax.random.key(0))
    )
    return {
        "rows": np.asarray(again).tolist(),
        "sums": np.asarray(sums).tolist(),
        "weight": float(jax_utils.unreplicate(weights)["w"]),
        "whole": float(whole(own, np.float32(2))),
        "keys": np.asarray(jax.random.key_data(keys)).tolist(),
    }
