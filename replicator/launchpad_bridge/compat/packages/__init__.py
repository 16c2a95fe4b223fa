"""Packages `launchpad` and `courier`, first on the path of a Launchpad program."""
