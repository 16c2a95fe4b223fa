"""A replicated learner as one node of a program."""
