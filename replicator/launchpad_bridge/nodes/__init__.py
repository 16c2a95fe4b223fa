"""The kinds of nodes."""
