"""Tests of `replicator.compat`."""
