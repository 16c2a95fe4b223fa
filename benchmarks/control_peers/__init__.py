"""SAC as a program here, beside SAC of Stable-Baselines3 and of its twin in JAX."""
