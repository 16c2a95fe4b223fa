"""What a jaxpr proves: what varies over replicas, where noise and padding go."""
