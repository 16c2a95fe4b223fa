"""Hold the check of first updates: it finds all that is wrong, and nothing else."""
