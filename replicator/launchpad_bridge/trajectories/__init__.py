"""What actors have seen, on its way to the learner."""
