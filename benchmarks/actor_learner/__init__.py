"""An IMPALA program against what it is made of, and against RLlib's."""
