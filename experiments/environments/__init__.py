"""Environments that experiments learn in."""
