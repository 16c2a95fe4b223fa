"""Prove to each other, below any message, that both ends hold the program's secret.

    client                                   server
      hello      version, nonce c     ->
                                      <-       challenge  version, nonce s
      answer     HMAC(client, c, s)   ->
                                      <-       welcome    HMAC(server, c, s)

Four messages of `MESSAGE_BYTES` each, nothing else is read before them, and both ends
give up after `HANDSHAKE_TIMEOUT_S`. HMAC-SHA256 over the role, the transport's binding
and both messages with the nonces: a proof of one role, connection or transport is not
valid for another, so neither a reflected nor a replayed transcript opens anything. The
server shows its proof last, only to a client that has shown one. A refusal is a message
too, so that the other end can name the reason; it opens nothing and reveals no more
than closing the connection would.

Pure: bytes in, bytes out. Transports move them, and bound their time.
"""

import enum
import hmac
import secrets
import struct

from replicator.errors import AuthenticationError, ConnectionLostError
from replicator.rpc.security.secret import Secret

PROTOCOL_VERSION = 1
HANDSHAKE_TIMEOUT_S = 2.0
PRESSED_S = 0.25
"""Seconds that a handshake may take while others wait for theirs."""

_LAYOUT = struct.Struct("!6sH32s")  # what it is, version, nonce or proof or reason
MESSAGE_BYTES = _LAYOUT.size
HELLO_BYTES = CHALLENGE_BYTES = ANSWER_BYTES = WELCOME_BYTES = MESSAGE_BYTES

_HELLO, _CHALLENGE, _ANSWER = b"rpc-hi", b"rpc-ch", b"rpc-an"
_WELCOME, _REFUSAL = b"rpc-ok", b"rpc-no"


class ServerHandshake:
    """The server's half of a handshake, for one connection.

    When a method raises, `refusal` holds the bytes to send before closing.

    Attributes:
      refusal: `MESSAGE_BYTES` that name the reason to the client; else empty.
    """

    def __init__(
        self, secret: Secret, *, binding: str = "", peer: str = "a client"
    ) -> None:
        """Start a handshake.

        Args:
          secret: Secret of the program.
          binding: Transport and address for which the proof is valid; equal at both
            ends.
          peer: Name of the other end, for errors.
        """
        self.refusal = b""
        self._secret = secret
        self._binding = binding
        self._peer = peer
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """Return the challenge that answers `hello`.

        Raises:
          AuthenticationError: The hello is invalid, or of another version.

        >>> secret = Secret(bytes(32))
        >>> client, server = ClientHandshake(secret), ServerHandshake(secret)
        >>> answer = client.answer(server.challenge(client.hello()))
        >>> client.finish(server.verify(answer))  # both have proved the secret
        """
        kind, version, _ = _parts(hello)
        if kind != _HELLO:
            raise self._refuse(_Reason.NOT_OURS, f"{self._peer} sent no hello.")
        if version != PROTOCOL_VERSION:
            text = _versions_differ(self._peer, version)
            raise self._refuse(_Reason.VERSION, text)
        challenge = _message(_CHALLENGE, secrets.token_bytes(32))
        self._transcript = bytes(hello) + challenge
        return challenge

    def verify(self, answer: bytes) -> bytes:
        """Return the welcome that ends the handshake, if `answer` proves the secret.

        Raises:
          AuthenticationError: The answer is not a proof.

        >>> server = ServerHandshake(Secret(bytes(32)), peer="a stranger")
        >>> stranger = ClientHandshake(Secret(b"x" * 32))
        >>> server.verify(stranger.answer(server.challenge(stranger.hello())))
        Traceback (most recent call last):
        ...
        replicator.errors.AuthenticationError: a stranger did not prove that it knows
        this program's secret. ...
        """
        # Taken away first: a second answer has no nonce to be tried against.
        transcript, self._transcript = self._transcript, b""
        expected = _message(
            _ANSWER, _proof(self._secret, "client", self._binding, transcript)
        )
        if not (hmac.compare_digest(answer, expected) and transcript):
            raise self._refuse(
                _Reason.PROOF,
                f"{self._peer} did not prove that it knows this program's secret. "
                f"{_REMEDY}",
            )
        return _message(
            _WELCOME, _proof(self._secret, "server", self._binding, transcript)
        )

    def _refuse(self, reason: "_Reason", text: str) -> AuthenticationError:
        self.refusal = _refusal(reason)
        return AuthenticationError(text)


class ClientHandshake:
    """The client's half of a handshake, for one connection."""

    def __init__(
        self, secret: Secret, *, binding: str = "", peer: str = "the server"
    ) -> None:
        """Start a handshake; arguments as for `ServerHandshake`."""
        self._secret = secret
        self._binding = binding
        self._peer = peer
        self._transcript = b""

    def hello(self) -> bytes:
        """Return the first message of the connection."""
        self._transcript = _message(_HELLO, secrets.token_bytes(32))
        return self._transcript

    def answer(self, challenge: bytes) -> bytes:
        """Return the answer to `challenge`.

        Raises:
          AuthenticationError: The challenge is invalid, or a refusal.
          ConnectionLostError: The server has no room for another client.
        """
        kind, version, _ = self._unless_refused(challenge)
        if kind != _CHALLENGE or not self._transcript:
            raise AuthenticationError(
                f"{self._peer} did not answer as a server of `rpc` does. Check the "
                "address."
            )
        if version != PROTOCOL_VERSION:
            raise AuthenticationError(_versions_differ(self._peer, version))
        self._transcript += bytes(challenge)
        return _message(
            _ANSWER, _proof(self._secret, "client", self._binding, self._transcript)
        )

    def finish(self, welcome: bytes) -> None:
        """Return if `welcome` proves that the server knows the secret as well.

        Raises:
          AuthenticationError: The welcome is not a proof, or is a refusal.
        """
        transcript, self._transcript = self._transcript, b""
        self._unless_refused(welcome)
        expected = _message(
            _WELCOME, _proof(self._secret, "server", self._binding, transcript)
        )
        if not (hmac.compare_digest(welcome, expected) and transcript):
            raise AuthenticationError(
                f"{self._peer} did not prove that it knows this program's secret. "
                f"{_REMEDY}"
            )

    def _unless_refused(self, message: bytes) -> tuple[bytes, int, bytes]:
        kind, version, rest = _parts(message)
        if kind != _REFUSAL:
            return kind, version, rest
        if rest[0] == _Reason.VERSION:
            raise AuthenticationError(_versions_differ(self._peer, version))
        if rest[0] == _Reason.NO_ROOM:
            raise ConnectionLostError(
                f"{self._peer} has no file descriptor left for another client. Raise "
                "its limit (`ulimit -n`), or close connections."
            )
        if rest[0] == _Reason.PROOF:
            raise AuthenticationError(
                f"{self._peer} refused this process: its secret is another one. "
                f"{_REMEDY}"
            )
        raise AuthenticationError(f"{self._peer} did not recognise this as a client.")


class _Reason(enum.IntEnum):
    NOT_OURS = 1
    VERSION = 2
    PROOF = 3
    NO_ROOM = 4


_REMEDY = "Give both ends the same secret (and the same host and port, if any)."


def is_hello(received: bytes) -> bool:
    """Return whether the bytes of a client begin a handshake.

    >>> is_hello(ClientHandshake(Secret(bytes(32))).hello()), is_hello(b"GET / HTTP")
    (True, False)
    """
    return received.startswith(_HELLO)


def is_refusal(received: bytes) -> bool:
    """Return whether the bytes of a server refuse a client without a proof.

    >>> is_refusal(NO_ROOM)
    True
    """
    return received.startswith(_REFUSAL)


def _message(kind: bytes, rest: bytes) -> bytes:
    return _LAYOUT.pack(kind, PROTOCOL_VERSION, rest)


def _refusal(reason: _Reason) -> bytes:
    return _message(_REFUSAL, bytes([reason]).ljust(32, b"\0"))


NO_ROOM = _refusal(_Reason.NO_ROOM)
"""Refusal that a server sends when it has no descriptor for another client."""


def _parts(message: bytes) -> tuple[bytes, int, bytes]:
    if len(message) != MESSAGE_BYTES:
        return b"", 0, bytes(32)
    return _LAYOUT.unpack(message)


def _proof(secret: Secret, role: str, binding: str, transcript: bytes) -> bytes:
    # Roles and bindings hold no NUL, and the transcript has one length: no two
    # different triples make the same bytes.
    return secret.sign(f"replicator rpc {role}\0{binding}\0".encode() + transcript)


def _versions_differ(peer: str, version: int) -> str:
    return (
        f"{peer} speaks version {version} of the protocol, this process version "
        f"{PROTOCOL_VERSION}. Install the same `jax-replicator` at both ends."
    )
