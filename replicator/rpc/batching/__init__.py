"""Merging of calls into one, and splitting of its result."""
