"""What stands last on the path of a Launchpad program: modules that it may lack."""
