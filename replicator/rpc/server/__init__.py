"""The end of a connection that is called."""
