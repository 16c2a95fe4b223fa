"""What a compiled program sends, keeps and computes, read from XLA's own text."""
