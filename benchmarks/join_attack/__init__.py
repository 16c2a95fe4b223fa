"""Strangers who want a place in a group: at its meeting, and at JAX's coordinator."""
