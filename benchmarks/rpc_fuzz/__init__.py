"""Messages and frames that nobody should send."""
