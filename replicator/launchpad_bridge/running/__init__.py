"""Running nodes: their context, their stop, their results."""
