"""Reduction of gradients over replicas, by the rules of a strategy."""
