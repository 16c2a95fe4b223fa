"""The command `replicator`: try it, start runs, look at them, check an installation."""
