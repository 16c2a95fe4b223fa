"""Sums of gradients over replicas that send fewer bytes, or fewer over slow links."""
