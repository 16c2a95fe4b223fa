"""Modules that a Launchpad program may lack; last on its path of modules."""
