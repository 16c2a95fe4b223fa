"""Proof of membership in the program: secrets, handshakes, certificates."""
