"""Programs that the proof must accept, and refuse."""
