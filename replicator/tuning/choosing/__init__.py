"""Choose a strategy: try what may be fastest, and keep the decision."""
