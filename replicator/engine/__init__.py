"""Lift what one replica does onto many devices: trace, prove, compile, call."""
