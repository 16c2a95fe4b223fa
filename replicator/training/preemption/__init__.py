"""Stop all processes at one step when one is asked to."""
