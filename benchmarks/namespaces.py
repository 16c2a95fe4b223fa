"""Hosts as network namespaces of this one, each with an address and a name of its own.

Needs root, `ip` and `unshare`, and `tc` to limit links. The name of a host is its
address: gloo asks the system for the address of its host's name.
"""

import contextlib
import shutil
import subprocess
import uuid


class Unavailable(Exception):
    """This machine gives no network namespaces, for a reason."""


class Namespaces:
    """Hosts in one network, `10.231.78.1`, `.2`, …; gone when the block ends.

    Args:
      count: Number of hosts.

    Raises:
      Unavailable: When it is entered: they cannot be made.
    """

    def __init__(self, count: int = 2) -> None:
        self._tag = f"rn{uuid.uuid4().hex[:6]}"
        self.addresses = tuple(f"10.231.78.{1 + number}" for number in range(count))

    def __enter__(self) -> "Namespaces":
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            reason = getattr(error, "stderr", None) or str(error)
            raise Unavailable(f"no network namespaces: {reason.strip()}") from error
        return self

    def __exit__(self, *error: object) -> None:
        for number in range(len(self.addresses)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", self._name(number))
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip("netns", "delete", self._switch)

    def command(self, number: int, command: list[str]) -> list[str]:
        """Return a command that runs another one on a host, under the host's name."""
        named = 'hostname "$0"; exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", named, self.addresses[number]]
        return ["ip", "netns", "exec", self._name(number), *inside, *command]

    def cut(self, number: int) -> None:
        """Cut the cable of a host: nothing passes, nothing is reported."""
        # At the switch: the host's own end still looks whole.
        _ip("-n", self._switch, "link", "set", self._cable(number), "nomaster")

    def mend(self, number: int) -> None:
        """Plug the cable in again."""
        _ip("-n", self._switch, "link", "set", self._cable(number), "master", "switch")

    def limit(self, mbit_per_s: int) -> None:
        """Limit what each host sends, in Mbit a second."""
        for number in range(len(self.addresses)):
            # A burst well below a step's messages; long queues, as nothing may be lost.
            rule = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb")
            inside = ("netns", "exec", self._name(number), "tc", "qdisc", "replace")
            _ip(*inside, "dev", "eth0", "root", *rule, "latency", "400ms")

    @property
    def _switch(self) -> str:
        return f"{self._tag}s"

    def _name(self, number: int) -> str:
        return f"{self._tag}{number}"

    def _cable(self, number: int) -> str:
        return f"c{number}"

    def _make(self) -> None:
        for needed in ("ip", "unshare"):
            if shutil.which(needed) is None:
                raise FileNotFoundError(f"no `{needed}`")
        switch = self._switch
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, address in enumerate(self.addresses):
            name, cable = self._name(number), self._cable(number)
            _ip("netns", "add", name)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "add", cable, *peer)
            _ip("-n", switch, "link", "set", cable, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
