"""Collectives, memory and arithmetic of a compiled program, read from XLA's text."""
