"""Replacement of the package of Launchpad's errors, with the type programs catch."""
