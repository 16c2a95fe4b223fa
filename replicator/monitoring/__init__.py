"""Observation of a run: phases, events, progress, its record."""
