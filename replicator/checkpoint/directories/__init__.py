"""Directories of checkpoints, with the same methods on a disk and in a bucket."""
