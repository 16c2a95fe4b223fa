"""Evaluate and predict: every example once, on any number of replicas."""
