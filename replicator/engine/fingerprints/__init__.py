"""Fingerprints of the copies that devices hold of a state, and their comparison."""
