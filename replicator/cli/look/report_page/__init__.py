"""One HTML page about a run: what it measured, what happened to it, where it ran."""
