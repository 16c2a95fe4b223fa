"""Compile a step for devices that may not be there, and compare strategies for it."""
