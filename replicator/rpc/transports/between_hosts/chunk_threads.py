"""The two threads of a connection: one reads its stream, one writes it."""

import threading
from collections.abc import Callable, Iterator

from replicator.rpc.transports.between_hosts.chunk_queues import Incoming, Outgoing


def start_reader(
    stream: Iterator[bytes], incoming: Incoming, outgoing: Outgoing
) -> None:
    """Move arriving chunks to their queue until the stream ends, then stop sending."""

    def read() -> None:
        # If our own end stopped it, its last messages may still leave.
        if incoming.fill_from(stream):
            outgoing.abandon()

    _start("rpc-stream-read", read)


def start_writer(outgoing: Outgoing, send: Callable[[bytes | None], None]) -> None:
    """Move chunks from their queue to the stream, and at the end None."""

    def write() -> None:
        while (chunk := outgoing.take()) is not None:
            send(chunk)
        send(None)

    _start("rpc-stream-write", write)


def _start(name: str, run: Callable[[], None]) -> None:
    # Ends with its stream or queue, which `close` ends. A daemon: a stopped peer must
    # not keep the process.
    threading.Thread(target=run, name=name, daemon=True).start()
