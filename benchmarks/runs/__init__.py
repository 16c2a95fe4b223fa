"""Runs and scripts that benchmarks start, and kill."""
