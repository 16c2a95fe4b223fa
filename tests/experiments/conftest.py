"""What all tests of experiments may use."""

import jax
import pytest


@pytest.fixture
def standard_promotion():
    """Let dtypes mix, as parts of optax do; in all threads, as nodes may be threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
