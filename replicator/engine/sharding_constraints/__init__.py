"""Emit a program again, with where its values lie written into it."""
