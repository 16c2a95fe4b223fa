"""Look at a program: the state of a run for terminal and browser."""
