"""The version of the distribution, in the one place that packaging reads."""

__version__ = "0.2.0"
