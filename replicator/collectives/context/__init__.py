"""Where a traced step is: axis, replica, microbatch, update; keys for these."""
