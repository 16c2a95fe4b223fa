"""Many clients of one server, for minutes."""
