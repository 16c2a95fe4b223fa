"""What a server answers itself, in the thread that read it: no handler, no waiting.

No method's name can begin with `~`, so these never hide one of the user's.
"""

HELLO = "~hello"
"""The client says its id and name; gets `PROTOCOL`, label and idempotent methods."""
LIST_METHODS = "~methods"
"""Gets the names of the methods."""
STATISTICS = "~statistics"
"""Gets the fields of `ServerStatistics`."""
PROTOCOL = 1
