"""What a run did, and does: phases, events, progress, its record."""
