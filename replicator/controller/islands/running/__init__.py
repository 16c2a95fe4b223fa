"""What an island runs: computations that it compiles, and functions of the host."""
