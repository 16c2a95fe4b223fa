"""Measure what replicator promises: each file is one claim, run as its own process.

`python -m benchmarks` runs all and prints a table; `python -m benchmarks.<name>` runs
one, whose last line is a JSON object.
"""
