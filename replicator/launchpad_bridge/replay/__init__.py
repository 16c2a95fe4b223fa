"""Replay tables: rows that stay after they were drawn, and what they are made of."""
