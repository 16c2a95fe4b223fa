"""One run, opening to end: where steps meet the clock, the disk and signals."""
