"""What a server answers itself, in the thread that read it: no handler, no waiting.

No method's name can begin with `~`, so these never hide one of the user's.
"""

HELLO = "~hello"
"""Takes the client's name; returns `PROTOCOL`, label and idempotent methods."""
WELCOME = "~welcome"
"""What the answer to that is called where it is checked."""
LIST_METHODS = "~methods"
"""Gets the names of the methods."""
STATISTICS = "~statistics"
"""Gets the fields of `ServerStatistics`."""
PROTOCOL = 2
