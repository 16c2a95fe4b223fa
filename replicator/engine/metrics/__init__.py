"""Declare how a metric merges over microbatches, replicas and batches, and merge it."""
