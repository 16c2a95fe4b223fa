"""Shorten Ray's report of a lost actor, which has many lines, to one.

Ray has no other form for it: its error for an actor whose process died, whose host is
gone, or whose constructor raised, is one class with a text.
"""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_IN_CONSTRUCTOR = "error raised in its creation task"
_DEAD = "The actor is dead because "
_DETAIL = "Worker exit detail: "
_ADVICE = " Some common causes include"
_LONGEST = 600


def how_actor_was_lost(text: str) -> str:
    """Return how an actor ended: "is lost, as its actor died (process 7 on …): …".

    Args:
      text: Text of the error that Ray raised for a call of the actor.

    >>> how_actor_was_lost("The actor is dead because its node has died.")
    'is lost, as its actor died. Ray reports: its node has died.'
    """
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines()]
    lines = [line for line in lines if line]
    if any(_IN_CONSTRUCTOR in line for line in lines):
        return f"could not be started on its host: {lines[-1][:_LONGEST]}"
    facts = dict(line.split(": ", 1) for line in lines if re.match(r"(pid|ip): ", line))
    where = f" (process {facts['pid']} on {facts['ip']})" if len(facts) == 2 else ""
    dead = next((line for line in lines if line.startswith(_DEAD)), "")
    why = dead.partition(_DETAIL)[2] or dead.removeprefix(_DEAD) or " ".join(lines)
    why = why.partition(_ADVICE)[0][:_LONGEST].strip()
    return f"is lost, as its actor died{where}. Ray reports: {why or 'nothing'}"
