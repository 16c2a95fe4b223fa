"""Attacks of a server that was taken over: on those who call it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.rpc_attack.attack import LONG_S, Won, hold
from replicator.errors import RpcError
from replicator.rpc.client.client import Client
from replicator.rpc.own_methods import PROTOCOL
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.connect import listen

_SHORT_S = 5.0
_HELLO_S = 2.0


@contextlib.contextmanager
def _rogue(
    kind: int,
    answer: Any,
    hello: Any = (PROTOCOL, "rogue", []),
    timeout_s: float = _SHORT_S,
) -> Iterator[Client]:
    """Yield a client of a server that answers each call with the same message."""
    secret = Secret.generate()
    listener = listen("unix:", secret=secret)

    def serve() -> None:
        with contextlib.suppress(RpcError):
            while True:
                connection = listener.accept()()
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: Any) -> None:
        with contextlib.suppress(RpcError):
            while True:
                message = connection.receive(timeout_s=None)
                if message.kind == MessageKind.CALL:
                    is_hello = message.payload.take()[0] == "~hello"
                    said = (MessageKind.REPLY, hello) if is_hello else (kind, answer)
                    connection.send(said[0], message.call_id, said[1], timeout_s=LONG_S)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        address = listener.address
        with Client(address, secret=secret, timeout_s=timeout_s) as client:
            yield client
    finally:
        listener.close()
        thread.join(LONG_S)


def _raises(kind: int, answer: Any, **options: Any) -> RpcError:
    """Return what a call raises, at once, and as an error of ours.

    Raises:
      Won: It raised something else, or nothing, or was tried until its deadline.
    """
    start_s = time.monotonic()
    with _rogue(kind, answer, **options) as client:
        try:
            client.anything()
        except RpcError as error:
            took_s = time.monotonic() - start_s
            hold(took_s < _SHORT_S - 1, f"it was tried for {took_s:.1f} s: {answer!r}")
            return error
        except Exception as error:
            raise Won(f"{answer!r} raised {type(error).__name__}: {error}") from error
    raise Won(f"{answer!r} raised nothing")


def attributes_of_errors() -> None:
    """Set what Python itself reads of an error: notes, causes, tracebacks."""
    for attributes in (
        {"__notes__": 5},
        {"__notes__": "abc"},
        {"__cause__": 5},
        {"__context__": 1, "__traceback__": 2},
        {"__class__": "x", "args": 5},
        {"with_traceback": 1, "add_note": 2},
    ):
        told = ("raised", ["ValueError"], "text", "trace", None, attributes)
        error = _raises(MessageKind.ERROR, told)
        notes = getattr(error, "__notes__", [])
        hold(isinstance(notes, list), f"{attributes} are its notes: {notes!r}")
        hold(all(isinstance(note, str) for note in notes), f"its notes are {notes!r}")


def errors_of_other_kinds() -> None:
    """Answer with errors that no server of ours sends."""
    for answer in (
        ("a word that nobody knows", 1.0),
        ("raised", ["SystemExit"], "text", "", None, None),
        ("raised", ["KeyboardInterrupt"], "text", "", None, None),
        ("raised", ["ExceptionGroup"], "text", "", None, None),
        ("raised", [], "", "", None, None),
        ("raised", ["os.system"], "text", "", 5, {"a": 1}),
        ("raised", 5, 5, 5, 5, 5),
        ("expired", 1j),
        (),
        5,
        None,
        {"raised": 1},
        "raised",
    ):
        _raises(MessageKind.ERROR, answer)


def strange_hellos() -> None:
    """Answer a client's hello with what is none."""
    for hello in (None, 5, (), (PROTOCOL,), (1j, 1j, 1j), "abc", (PROTOCOL, 5, 5)):
        start_s = time.monotonic()
        with _rogue(MessageKind.REPLY, 1, hello, _HELLO_S) as client:
            try:
                client.anything()
            except RpcError:
                pass
            except Exception as error:
                raise Won(f"{hello!r} raised {type(error).__name__}") from error
        took_s = time.monotonic() - start_s
        hold(took_s < 3 * _HELLO_S, f"{hello!r} took {took_s:.1f} s")


def commands_to_a_terminal() -> None:
    """Put escape sequences into all that a server says of an error and itself."""
    bad = "\x1b]0;x\x07\x1b[2J\x9b2J\r"
    told = ("raised", [bad], bad, bad, None, None)
    error = _raises(MessageKind.ERROR, told, hello=(PROTOCOL, bad, []))
    shown = "".join([str(error), *getattr(error, "__notes__", [])])
    hold(not set(shown) & set("\x1b\x07\x9b\r"), f"an error shows {shown!r}")
    error = _raises(MessageKind.ERROR, ("expired", 1.0), hello=(PROTOCOL, bad, []))
    hold(not set(str(error)) & set("\x1b\x07\x9b\r"), f"an error shows {error!r}")


ATTACKS: dict[str, Callable[[], None]] = {
    attack.__name__: attack
    for attack in (
        attributes_of_errors,
        errors_of_other_kinds,
        strange_hellos,
        commands_to_a_terminal,
    )
}
