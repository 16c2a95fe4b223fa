"""Addresses that nodes are promised, and what makes them."""
