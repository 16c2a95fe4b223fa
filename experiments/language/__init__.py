"""Language models: text, tokens, training, and files of weights that others read."""
