"""Processes that have arrived at the meeting, and the errors that refuse others."""

import dataclasses
import json

from replicator.base.accepts import ArgumentRule, seconds, text, whole

MAX_SKEW_S = 3600.0
"""How far clocks of two hosts may differ: certificates have dates."""

_FIELDS: dict[str, ArgumentRule] = {
    "process_id": whole(),
    "num_processes": whole(1),
    "host": text(255),
    "patience_s": seconds(),
    "clock_s": seconds(),
    "has_tls": ArgumentRule("true or false", lambda value: isinstance(value, bool)),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The line that a process sends when it arrives.

    Attributes:
      process_id: Its number.
      num_processes: Number of processes in the group, as far as it knows.
      host: Name of its host, for messages only.
      patience_s: Seconds that it is still going to wait.
      clock_s: Time of its clock, in seconds since 1970.
      has_tls: Whether it is going to start JAX with a certificate.
    """

    process_id: int
    num_processes: int
    host: str
    patience_s: float
    clock_s: float
    has_tls: bool

    def to_line(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Processes of a group that have arrived, and the end of their wait.

    Attributes:
      num_processes: Number of processes in the group.
      deadline_s: The earliest end of a wait, on the server's clock.
      has_tls: Whether process 0 is going to start JAX with a certificate.
      hosts: Host name of each process that has arrived.
    """

    num_processes: int
    deadline_s: float
    has_tls: bool
    hosts: dict[int, str]

    @property
    def is_complete(self) -> bool:
        """Whether all have arrived."""
        return len(self.hosts) == self.num_processes

    @property
    def missing(self) -> list[int]:
        """Numbers of the processes that have not arrived."""
        return [p for p in range(self.num_processes) if p not in self.hosts]

    def arrive(self, hello: Hello, *, now_s: float, clock_s: float) -> "Members | str":
        """Return the members with one more process, or the error that refuses it.

        >>> nobody = Members(num_processes=1, deadline_s=9, has_tls=False, hosts={})
        >>> hello = Hello(process_id=0, num_processes=1, host="b", patience_s=30,
        ...               clock_s=0, has_tls=False)
        >>> nobody.arrive(hello, now_s=0, clock_s=0).is_complete
        True
        """
        who = f"process {hello.process_id} (on {hello.host})"
        if hello.num_processes != self.num_processes:
            return (
                f"`num_processes` must be the same everywhere, got "
                f"{hello.num_processes} in {who} and {self.num_processes} in process "
                "0. Give all the same number."
            )
        if not 0 <= hello.process_id < self.num_processes:
            return (
                f"`process_id` must be below {self.num_processes}, got "
                f"{hello.process_id} (on {hello.host}). Number processes from 0."
            )
        if hello.process_id in self.hosts:
            return (
                f"`process_id` must differ in every process, got {hello.process_id} on "
                f"{self.hosts[hello.process_id]} and on {hello.host}. Number them "
                "anew, and see whether an earlier run still lives."
            )
        if hello.has_tls != self.has_tls:
            with_tls, without = ("process 0", who)[:: 1 if self.has_tls else -1]
            return (
                "`jax` and `cryptography` must be the same everywhere, got certificates"
                f" in {with_tls} and none in {without}. Install jax 0.12 or newer and "
                "`jax-replicator[grpc]` in all."
            )
        skew_s = hello.clock_s - clock_s
        if self.has_tls and abs(skew_s) > MAX_SKEW_S:
            return (
                "The clocks of all hosts must agree, got one that is "
                f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'} in {who}. "
                "Set it: certificates have dates."
            )
        return dataclasses.replace(
            self,
            deadline_s=min(self.deadline_s, now_s + hello.patience_s),
            hosts=self.hosts | {hello.process_id: hello.host},
        )

    def leave(self, process_id: int) -> "Members":
        """Return the members without a process that has gone again."""
        hosts = {p: host for p, host in self.hosts.items() if p != process_id}
        return dataclasses.replace(self, hosts=hosts)


def parse_hello(line: bytes) -> Hello | None:
    """Return the fields of a line; None if they are not those of `Hello`.

    >>> parse_hello(b'{"process_id": -1}') is None
    True
    """
    try:
        read = json.loads(line)
        if not all(rule.is_right(read[name]) for name, rule in _FIELDS.items()):
            return None
        hello = Hello(**{name: read[name] for name in _FIELDS})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return hello if hello.host.isprintable() and hello.host else None


def describe_missing(missing: list[int], num_processes: int, *, most: int = 16) -> str:
    """Name the missing processes.

    >>> describe_missing([1, 3], 4)
    'processes 1, 3 of 4'
    """
    named = ", ".join(map(str, missing[:most]))
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    noun = "process" if len(missing) == 1 else "processes"
    return f"{noun} {named}{more} of {num_processes}"
