"""What attackers do to a server, for tests: before, in and after the handshake."""

import contextlib
import ipaddress
import os
import pickle
import socket
import subprocess
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replicator.errors import AuthenticationError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.authentication import MESSAGE_BYTES, ClientHandshake
from replicator.rpc.security.secret import DESCRIPTOR_VARIABLE, FILE_VARIABLE, Secret
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.frames import frame_without_buffers
from tests.rpc.transports.between_hosts.grpc_ends import Stranger
from tests.rpc.transports.ends import LONG_S

ADDRESSES = "unix:,grpc://127.0.0.1:0"


class Attacked:
    """A server in another process: its addresses, its memory, what it wrote."""

    def __init__(self, process, address, secret, log):
        self.process = process
        self.secret = secret
        self.unix, self.grpc = address.split(",")
        self.path = self.unix.removeprefix("unix:")
        self.port = int(self.grpc.rpartition(":")[2])
        self.binding = f"grpc:127.0.0.1:{self.port}"
        self._log = log

    @property
    def address(self):
        """As listeners have it, for `Stranger`."""
        return self.grpc

    def read(self, name):
        return Path(f"/proc/{self.process.pid}/{name}").read_bytes()

    def written(self):
        return self._log.read_bytes()

    def memory(self, name="VmRSS"):
        """Return KiB: now, or at the peak since `forget_peak` (`VmHWM`)."""
        (line,) = [x for x in self.read("status").splitlines() if name.encode() in x]
        return int(line.split()[1])

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def forget_peak(self):
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def attacked(folder):
    secret = Secret.generate()
    descriptor = secret.inheritable_descriptor()
    environment = {**os.environ, DESCRIPTOR_VARIABLE: f"{descriptor}"}
    environment.pop(FILE_VARIABLE, None)
    log = folder / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.security.secured_server", ADDRESSES],
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        os.close(descriptor)
        try:
            address = process.stdout.readline().strip()
            yield Attacked(process, address, secret, log)
        finally:
            process.kill()


# Who listens where.


def tcp_listeners(process_id):
    """Return the addresses at which a process listens."""
    own = set()
    for number in os.listdir(f"/proc/{process_id}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{process_id}/fd/{number}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(_address(fields[1].partition(":")[0]))
    return found


def _address(written):
    """Read an address of /proc/net: words of 4 bytes, each in the host's order."""
    data = bytes.fromhex(written)
    words = [data[at : at + 4][::-1] for at in range(0, len(data), 4)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


# Strangers.


@contextlib.contextmanager
def raw_socket(server):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LONG_S)
        raw.connect(server.path)
        yield raw


def read_message(raw):
    """Return a message of the handshake; less of it if the server closes."""
    message = b""
    while len(message) < MESSAGE_BYTES:
        part = raw.recv(MESSAGE_BYTES - len(message))
        if not part:
            break
        message += part
    return message


def is_closed(raw):
    """Tell whether the server hangs up, after a refusal or without a word."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(65_536):
            pass
    return True


def try_secret(address, secret):
    """Return whether a secret opens a server."""
    try:
        connect(address, secret=secret, timeout_s=LONG_S).close()
    except AuthenticationError:
        return False
    return True


def flood_socket(server, num_bytes):
    """Answer the challenge wrongly and send on, until cut off."""
    handshake = ClientHandshake(Secret.generate(), binding="unix")
    with raw_socket(server) as raw, contextlib.suppress(OSError):
        raw.sendall(handshake.hello())
        raw.sendall(handshake.answer(read_message(raw)))
        for _ in range(num_bytes >> 20):
            raw.sendall(bytes(1 << 20))


def flood_grpc(server, num_bytes):
    """As `flood_socket`, and do not even read the refusal."""
    handshake = ClientHandshake(Secret.generate(), binding=server.binding)
    with Stranger(server) as stranger:
        stranger.send(handshake.hello())
        stranger.send(handshake.answer(stranger.receive()))
        for _ in range(num_bytes >> 20):
            stranger.send(bytes(1 << 20))
        while stranger.receive() is not None:
            pass


def flood_grpc_at_once(server, num_bytes):
    """Send one large message in place of the first."""
    with Stranger(server) as stranger:
        stranger.send(bytes(num_bytes))
        while stranger.receive() is not None:
            pass


def growth_kib(server, flood, *, strangers, num_bytes):
    """Return by how much a server grows, at its peak, while strangers flood it."""
    before = server.memory()
    server.forget_peak()
    with ThreadPoolExecutor(strangers) as pool:
        floods = [pool.submit(flood, server, num_bytes) for _ in range(strangers)]
        for one in floods:
            one.result(4 * LONG_S)
    return server.memory("VmHWM") - before


# Pickles.


class Trap:
    """What makes a directory when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return os.mkdir, (self._path,)


def pickles(path):
    """Return what makes a directory at `path` when it is unpickled."""
    pickled = [pickle.dumps(Trap(path), protocol) for protocol in range(6)]
    return [*pickled, pickle.dumps([1, {"a": Trap(path)}])]


def traps(path):
    """Return bytes that would make a directory at `path`, if somebody ran them."""
    command = f"__import__('os').mkdir({str(path)!r})".encode()
    yaml = f"!!python/object/apply:os.mkdir [{path}]".encode()
    # As the courier of Launchpad told a peer to call something.
    words = (b"posix", b"mkdir", str(path).encode())
    reduced = b"".join(bytes([10, len(word)]) + word for word in words)
    return [
        *pickles(path),
        command,
        yaml,
        reduced,
        b"cos\nmkdir\n(V" + command + b"\ntR.",
    ]


KINDS = [*MessageKind, 0, 129, 255]


def send_frames(server, payloads):
    """Be a program's own process, and send each payload as a message of each kind."""
    for payload in payloads:
        with contextlib.closing(
            connect(server.unix, secret=server.secret, timeout_s=LONG_S)
        ) as connection:
            for number, kind in enumerate(KINDS):
                frame = frame_without_buffers(kind, number, payload)
                with contextlib.suppress(OSError):
                    connection._socket.sendall(frame)
        with Stranger(server) as stranger:
            stranger.prove(server.secret)
            for number, kind in enumerate(KINDS):
                stranger.send(frame_without_buffers(kind, number, payload))


def send_raw(server, payloads):
    """Send bytes before any handshake, to the socket and to the TCP port."""
    for payload in payloads:
        with raw_socket(server) as raw:
            raw.sendall(payload.ljust(MESSAGE_BYTES, b"\0"))
            is_closed(raw)
        with socket.create_connection(("127.0.0.1", server.port), LONG_S) as raw:
            raw.sendall(payload)
        with Stranger(server) as stranger:
            stranger.send(payload)
            while stranger.receive() is not None:
                pass


def forms_of(secret):
    """Return how a secret could show itself."""
    key = secret._key
    return [
        key,
        key.hex().encode(),
        repr(key)[2:-1].encode(),
        str(list(key)).encode()[1:-1],
        urllib.parse.quote_from_bytes(key).encode(),
    ]
