"""Checkpoints in buckets: opened, written, committed and swept without a rename.

A bucket has no rename and no locks. What it has is a put that holds only where nothing
is yet, and that is enough: for one writer after another (`writer`), and for a
checkpoint that is whole from the moment its manifest is there (`commit`).
"""
