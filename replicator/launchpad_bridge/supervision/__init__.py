"""Decide what is started, restarted and stopped when a worker ends."""
