"""Mistakes of a first hour, and what the library answers to each."""
