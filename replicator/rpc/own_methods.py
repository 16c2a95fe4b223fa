"""Built-in methods of a server, answered in the reader thread without waiting.

No method's name can begin with `~`, so these never hide one of the user's.
"""

HELLO = "~hello"
"""Takes the client's name; returns `PROTOCOL`, label and idempotent methods."""
WELCOME = "~welcome"
"""Name under which the reply to `HELLO` is checked."""
LIST_METHODS = "~methods"
"""Returns the names of the methods."""
STATISTICS = "~statistics"
"""Returns the fields of `ServerStatistics`."""
PROTOCOL = 2
