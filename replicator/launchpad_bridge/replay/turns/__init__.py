"""Replay tables whose actors take turns: the same samples in each run, over kills."""
