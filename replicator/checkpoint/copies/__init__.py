"""Copies of a run's state in the memory of launchers, for restarts within seconds."""
