"""Files of weights: what others compute with them, and that no bit changes in them."""
