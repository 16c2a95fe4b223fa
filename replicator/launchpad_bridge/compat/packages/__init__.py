"""What stands first on the path of a Launchpad program: `launchpad` and `courier`."""
