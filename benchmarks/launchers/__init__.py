"""Processes that train alone under launchers: real ones, and their environments."""
