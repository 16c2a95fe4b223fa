"""Attacks on a group by strangers: at its meeting, and at JAX's coordinator."""
