"""Make the first updates of a partitioned step twice, and compare: law 1 in a run."""
