"""Room for what is under way: a semaphore, at a tenth of `threading`'s price."""

import queue

Room = queue.SimpleQueue[None]
"""An item for each that may still begin: it is taken out, and put back at the end."""


def room_for(count: int) -> Room:
    """Return room for so many.

    >>> room = room_for(1)
    >>> room.get(), room.empty()
    (None, True)
    """
    room: Room = queue.SimpleQueue()
    for _ in range(count):
        room.put(None)
    return room
