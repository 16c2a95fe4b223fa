"""Position of a traced step: axis, replica, microbatch, update; keys for these."""
