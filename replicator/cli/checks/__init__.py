"""Checks of `replicator doctor`: each is a function of measurements."""
