"""Looking at a program that runs: found, proved one's own, sampled; never slowed."""
