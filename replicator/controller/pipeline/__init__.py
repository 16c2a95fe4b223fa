"""Pipelines: stages on slices, their schedules, and one device's update of all."""
