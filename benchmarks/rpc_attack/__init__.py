"""Attacks on a running server and a running program; `__main__` counts them."""
