"""Environments, and who acts in them."""
