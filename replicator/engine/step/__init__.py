"""From a step of the user to one update: pure, traced transforms; the optimizer."""
