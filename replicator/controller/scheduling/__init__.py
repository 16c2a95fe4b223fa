"""Runs of dataflows: what is sent to islands, and in which order."""
