"""Emit a program again, with constraints on where its values lie."""
