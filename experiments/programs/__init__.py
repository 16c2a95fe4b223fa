"""Programs of service nodes, one idea each: read them to learn how programs are made.

Each runs by itself, `python -m experiments.programs.word_count`, where
`--launch_type=threads|processes|ray` decides; each is a function of its settings that
returns the results.
"""
