"""Cut the leaves of a state into shards, deal these to processes, write and read them.

`grid` and `plan` decide, from shapes and shardings alone, so that all processes decide
the same; `arrays` and `format1` are the only modules that use TensorStore.
"""
