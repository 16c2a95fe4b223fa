"""Experiments that train models of ours; each is a program with flags of its own."""
