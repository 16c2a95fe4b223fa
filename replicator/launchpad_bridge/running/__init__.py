"""What a node finds where it runs: its context, its stop, its results."""
