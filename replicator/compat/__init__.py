"""Run code of the days of `pmap` on today's JAX: a line or two of it changes.

`from replicator.compat import jax` (or `pmap` alone), `jax_utils` for what was in
`flax.jax_utils`. See `docs/start/from_pmap.md`.
"""

from replicator.compat.pmap import pmap
from replicator.compat.replicas import device_put_replicated, device_put_sharded

__all__ = ["device_put_replicated", "device_put_sharded", "pmap"]
