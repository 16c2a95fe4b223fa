"""Calls that are merged into one, and results that are taken apart again."""
