"""Who belongs to the program: secrets, proofs, certificates."""
