"""Memory that strategies keep on each device, measured and ahead of time."""
