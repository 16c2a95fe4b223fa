"""Islands: JAX runtimes that run the ops of dataflows, one thread and order each."""
