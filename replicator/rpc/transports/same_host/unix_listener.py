"""Listen on a Unix socket whose path one server has at a time.

Beside the socket lies a lock file with the owner's process id. The system gives the
lock back when its owner dies, however it dies: a socket whose lock is free is a dead
server's, and is replaced; one whose lock is held is refused, with the owner's name.
"""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import select
import selectors
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from typing import Any

from replicator.base.host.forks import register_fork_drop
from replicator.base.host.held_folder import hold_folder
from replicator.errors import AddressInUseError, ConnectionLostError
from replicator.rpc.security.authentication import NO_ROOM
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.payloads import Encoding
from replicator.rpc.transports.same_host.unix_handshake import meet_client
from replicator.rpc.transports.same_host.unix_socket import UnixConnection

_BACKLOG = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_MS = 100
_log = logging.getLogger(__name__)


class UnixListener:
    """Listener for clients of this host; see `Listener`."""

    def __init__(
        self,
        path: str,
        *,
        secret: Secret,
        encoding: Encoding,
        owns_directory: bool = False,
    ) -> None:
        """Listen.

        Args:
          path: Path of the socket, in a directory that only this user can enter.
          secret: Secret that clients must know.
          encoding: Encoding of values.
          owns_directory: Whether `close` removes the directory.

        Raises:
          AddressInUseError: Another server listens there, or the path is a file.
        """
        self._path = path
        self._secret = secret
        self._encoding = encoding
        self._owns_directory = owns_directory
        self._is_closed = False
        # Taken first: with it, no other process removes or binds the path.
        self._lock = _PathLock(path)
        try:
            _remove_stale_socket(path)
            self._socket = _bound_socket(path)
        except BaseException:
            self._lock.release()
            raise
        self._waker, self._wake = socket.socketpair()
        self._spare = socket.socket(socket.AF_UNIX)  # a descriptor, for `_turn_away`
        # Held inside of `accept`, and while the descriptors are closed, so that none
        # is closed under `select`. No other lock is taken under it.
        self._accept_lock = threading.Lock()
        # Used inside of `accept` alone; closed with the sockets that it watches.
        self._selector = selectors.DefaultSelector()
        for watched in (self._socket, self._waker):
            self._selector.register(watched, selectors.EVENT_READ)
        register_fork_drop(self)

    @property
    def address(self) -> str:
        """Return the address that a client gives to `connect`."""
        return f"unix:{self._path}"

    def accept(self) -> Callable[[], UnixConnection]:
        """Wait for a client; return its handshake. See `Listener`."""
        if not self._accept_lock.acquire(timeout=1.0):  # `close` has it for a moment
            raise RuntimeError(f"Two threads accept at {self.address}. Let one do it.")
        try:
            while not self._is_closed:
                self._selector.select()
                if not self._is_closed and (sock := self._accept_one()):
                    return functools.partial(
                        meet_client,
                        sock,
                        address=self.address,
                        secret=self._secret,
                        encoding=self._encoding,
                        do_others_wait=self._do_others_wait,
                    )
            raise ConnectionLostError(f"{self.address} is closed.")
        finally:
            self._accept_lock.release()
            if self._is_closed:
                self._close_when_idle()

    def close(self) -> None:
        """Stop listening, and remove the socket. May be called twice."""
        if self._is_closed:
            return
        # Read by `accept`, which the waker wakes below.
        self._is_closed = True
        # While its lock is held: later the path may be another server's.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # refuses pending clients
        self._wake.close()  # `accept` sees the end of the pair
        self._lock.release()
        if self._owns_directory:
            shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)
        self._close_when_idle()

    def drop_after_fork(self) -> None:
        """Close a forked child's descriptors; the socket stays its parent's.

        A child that kept them would hold the path after its parent's death.
        """
        # Without `accept`'s lock: a thread of the parent may have held it.
        if not self._is_closed:
            self._is_closed = True
            self._lock.drop_after_fork()
            for inherited in (*self._descriptors(), self._wake):
                inherited.close()

    def _close_when_idle(self) -> None:
        """Give the descriptors back, unless `accept` watches them: then it will."""
        if self._accept_lock.acquire(blocking=False):
            try:
                for each in self._descriptors():
                    each.close()
            finally:
                self._accept_lock.release()

    def _descriptors(self) -> tuple[Any, ...]:
        return self._selector, self._socket, self._waker, self._spare

    def _accept_one(self) -> socket.socket | None:
        try:
            return self._socket.accept()[0]
        except OSError as error:
            if error.errno in _NO_ROOM:
                _log.warning("%s cannot accept a client: %s.", self.address, error)
                self._turn_away()
                pause = select.poll()
                pause.register(self._waker, select.POLLIN)
                pause.poll(_PAUSE_MS)
            return None  # also a client that is gone again

    def _turn_away(self) -> None:
        """Send waiting clients the reason, with the descriptor kept for that."""
        self._spare.close()
        with contextlib.suppress(OSError):  # no more of them
            for _ in range(_BACKLOG):
                with self._socket.accept()[0] as sock:
                    sock.send(NO_ROOM, socket.MSG_DONTWAIT)
        # Kept again for the next time, if there is a descriptor by now.
        with contextlib.suppress(OSError):  # another thread took it
            self._spare = socket.socket(socket.AF_UNIX)

    def _do_others_wait(self) -> bool:
        waiting = select.poll()
        with contextlib.suppress(ValueError):  # closed: nobody
            waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(0))


class _PathLock:
    """The right to listen at a path."""

    def __init__(self, path: str) -> None:
        """Take it, or raise `AddressInUseError` at once."""
        self._path = f"{path}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # Of the open file: the kernel frees it when its process dies.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(descriptor, 32).decode(errors="replace").strip()
                os.close(descriptor)
                raise AddressInUseError(
                    f"`address` must be free, got unix:{path}, where process "
                    f"{owner or 'unknown'} listens. Stop it, or choose another path."
                ) from None
            if _is_same_file(descriptor, self._path):
                break
            os.close(descriptor)  # its owner removed it between the two calls
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        # The folder, too, against programs that remove old files: it holds a secret.
        self._descriptors = descriptor, hold_folder(os.path.dirname(path))

    def release(self) -> None:
        """Give it up; the file goes first, so that no process locks a nameless one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self.drop_after_fork()

    def drop_after_fork(self) -> None:
        """Close the descriptors; of a forked child, whose parent's hold the locks."""
        # Not `LOCK_UN`: parent and child have one lock, which that would free.
        for descriptor in self._descriptors:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_stale_socket(path: str) -> None:
    """Remove what a dead server left; its lock is ours now."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUseError(
            f"`address` must be free, got unix:{path}, where there is a file "
            f"({stat.filemode(mode)}). Choose another path."
        )
    os.unlink(path)


def _bound_socket(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # a client may be gone between `select` and `accept`
        # The directory is this user's alone, so no other connects before the `chmod`.
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
