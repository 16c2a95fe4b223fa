"""Be another user of this host, and try something: `... .other_user NAME WORD...`.

Needs root, who becomes nobody for good. The last line that it writes is a JSON string:
what came of it, "" for nothing.
"""

import json
import os
import socket
import sys
from pathlib import Path

from replicator.rpc.security.authentication import MESSAGE_BYTES, ClientHandshake
from replicator.rpc.security.secret import Secret

NOBODY = 65534


def connect(path: str) -> str:
    """Connect to a socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
    return "it is connected"


def prove(path: str, key: str) -> str:
    """Prove the secret, which somebody has told."""
    handshake = ClientHandshake(Secret(bytes.fromhex(key)), binding="unix")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(path)
        sock.sendall(handshake.hello())
        sock.sendall(handshake.answer(sock.recv(MESSAGE_BYTES)))
        return "it got in" if sock.recv(6) == b"rpc-ok" else ""


def read(*paths: str) -> str:
    """Read files, or list folders."""
    found = []
    for path in paths:
        try:
            found.append(os.listdir(path) if os.path.isdir(path) else _bytes(path))
        except OSError:
            continue
    return f"it reads {found}"[:200] if found else ""


def link(path: str, to: str) -> str:
    """Be the first to make something: a link."""
    os.symlink(to, path)
    return ""


def folder(path: str) -> str:
    """The same with a folder, which all may enter."""
    os.mkdir(path)
    os.chmod(path, 0o777)
    return ""


def _bytes(path: str) -> bytes:
    return Path(path).read_bytes()[:32]


def main(name: str, *words: str) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tries = {each.__name__: each for each in (connect, prove, read, link, folder)}
    try:
        found = tries[name](*words)
    except OSError:
        found = ""
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
