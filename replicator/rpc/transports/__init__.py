"""Ways to carry messages: within a process, a host, between hosts."""
