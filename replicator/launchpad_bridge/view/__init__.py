"""Look at a program: drawings, and the state of a run for terminal and browser."""
