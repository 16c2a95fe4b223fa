"""Processes forked from one that has imported all, and what watches them."""
