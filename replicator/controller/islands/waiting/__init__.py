"""What an island dispatched, and who waits until it is computed."""
