"""This process and its machine: clock, files, descriptors, devices, text."""

from replicator.base.host import exit_codes

__all__ = ["exit_codes"]
