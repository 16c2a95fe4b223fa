"""A real sshd of this user alone, with keys and a configuration in one folder.

Nothing outside of the folder is read or written: not `~/.ssh`, not `/etc/ssh`. A script
`ssh` in `folder/bin`, to be first in PATH, is the system's with the folder's
configuration, as a user has one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicator.distributed.processes.ports import free_port

_START_S = 30.0
_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AcceptEnv *
"""
_CLIENT = """\
Host {hosts}
  HostName {address}
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


class Unavailable(Exception):
    """sshd does not run here, for a reason."""


class SshServer:
    """A running sshd, and a client's configuration; gone when the block ends.

    Args:
      folder: Folder for its files, empty or new.
      address: Address that it listens on.
      inside: Returns the command that runs another one on its host; by default here.

    Attributes:
      port: Its port.

    Raises:
      Unavailable: When it is entered: there is no sshd, or it does not start.
    """

    def __init__(
        self, folder: Path, address: str = "127.0.0.1", *, inside: Sequence[str] = ()
    ) -> None:
        self.folder, self.address, self._inside = folder, address, inside
        self.port = free_port()

    def __enter__(self) -> "SshServer":
        # It starts itself anew for each connection, so by its whole path.
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if sshd is None or shutil.which("ssh") is None:
            raise Unavailable("no sshd: install Debian's openssh-server")
        self.folder.mkdir(exist_ok=True)
        self._write_files()
        command = [sshd, "-f", f"{self.folder}/sshd_config"]
        if os.getuid() == 0 and not Path("/run/sshd").exists():
            # A folder that Debian's service makes: here for this sshd alone.
            make = 'mount -t tmpfs none /run; mkdir -m 755 /run/sshd; exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", make, "sh", *command]
        command = [*self._inside, *command]
        self._log = (self.folder / "sshd.log").open("w")
        self._process = subprocess.Popen(
            [*command, "-D", "-e"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Of this user's variables none reaches a session but these.
            env={"PATH": os.environ["PATH"]},
        )
        self._wait_until_it_listens()
        return self

    def __exit__(self, *error: object) -> None:
        for pid in (*self.descendants(), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    @property
    def environ(self) -> Mapping[str, str]:
        """Variables with which a launcher finds this `ssh` first."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def sessions(self) -> list[int]:
        """List sshd's own processes, one or two for each connection."""
        return [pid for pid in self.descendants() if _is_sshd(pid)]

    def descendants(self) -> list[int]:
        """List the processes of all sessions, those deeper later."""
        found, parents = [], [self._process.pid]
        while parents:
            parent = parents.pop()
            with contextlib.suppress(OSError):
                listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
                below = [int(pid) for pid in listed.split()]
                found += below
                parents += below
        return found

    def know(self, key: str) -> None:
        """Have the client know a key as this host's; none if it is empty."""
        line = f"[{self.address}]:{self.port} {key}" if key else ""
        (self.folder / "known_hosts").write_text(line)

    def _write_files(self) -> None:
        for name in ("host_key", "user_key"):
            make_key(self.folder / name)
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized_keys")
        fields = {"folder": self.folder, "port": self.port, "address": self.address}
        (self.folder / "sshd_config").write_text(_SERVER.format(**fields))
        self.write_client(self.address)
        self.know((self.folder / "host_key.pub").read_text())
        (self.folder / "bin").mkdir()
        wrapper = self.folder / "bin" / "ssh"
        ssh = shutil.which("ssh")
        wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {self.folder}/config "$@"\n')
        wrapper.chmod(0o755)

    def write_client(self, *hosts: str) -> None:
        """Write the client's configuration: these names lead to this host."""
        text = _CLIENT.format(
            hosts=" ".join(hosts),
            folder=self.folder,
            port=self.port,
            address=self.address,
        )
        (self.folder / "config").write_text(text)

    def _wait_until_it_listens(self) -> None:
        until_s = time.monotonic() + _START_S
        while "Server listening" not in (self.folder / "sshd.log").read_text():
            if self._process.poll() is not None or time.monotonic() > until_s:
                printed = (self.folder / "sshd.log").read_text().strip()
                self.__exit__()
                raise Unavailable(f"sshd does not start: {printed}")
            time.sleep(0.01)


def _is_sshd(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    return False


def make_key(path: Path) -> None:
    """Make a pair of keys without a passphrase."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
