"""The end of a connection that calls."""
