"""Serve an island to one controller at a time, and to that controller's islands.

What arrives is data, and the bytes of `jax.export`; every connection proves that it
knows the island's secret (`rpc`). A recipe comes by another way, from the process that
started this one, and is asked for by its number here.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

import jax

from replicator.base.accepts import (
    ArgumentRule,
    accepts,
    blob,
    items,
    seconds,
    text,
    whole,
)
from replicator.base.host.clock import Clock, SystemClock
from replicator.base.mesh import jax_devices
from replicator.base.types import Device
from replicator.controller.islands.exports import function_of_export, function_of_recipe
from replicator.controller.islands.hosted import HostedIsland
from replicator.controller.islands.in_process import described
from replicator.controller.islands.protocol import IslandDevice
from replicator.controller.islands.wire import Data
from replicator.distributed.jax_group import accept_jax_group, group_token
from replicator.errors import ArgumentError
from replicator.rpc.client.client import Client
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.server.server import Server

_MOST_ITEMS = 1 << 16


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_key(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


_TABLE = ArgumentRule(
    "a dictionary of at most 1024 names",
    lambda value: isinstance(value, dict) and len(value) <= 1024,
)
_ADDRESSES = ArgumentRule(
    "a dictionary of at most 1024 texts",
    lambda value: (
        isinstance(value, dict)
        and len(value) <= 1024
        and all(map(text(4096).is_right, (*value, *value.values())))
    ),
)
_ITEMS = items("lists", _is_list, _MOST_ITEMS)
_KEYS = items("pairs of numbers", _is_key, _MOST_ITEMS)
_SENDER = ArgumentRule(
    "a number of a process, or its name",
    lambda value: whole().is_right(value) or text().is_right(value),
)
_SHARDS = ArgumentRule(
    f"two lists of at most {_MOST_ITEMS}, or None",
    lambda value: (
        value is None
        or (
            _is_key(value)
            and all(_is_list(each) and len(each) <= _MOST_ITEMS for each in value)
        )
    ),
)
_ERROR = ArgumentRule(
    "five texts, or None",
    lambda value: (
        value is None
        or (
            _is_list(value)
            and len(value) == 5
            and all(map(text(1 << 16).is_right, value))
        )
    ),
)
_MOST_PROGRAM_BYTES = 1 << 30
_RECIPE_S = 60.0
_MOST_WAIT_S = 60.0


def _connected(
    address: str,
    *,
    secret: Secret | None = None,
    tls: Tls | None = None,
    needs_tls: bool = False,
) -> Client:
    """Return a client of another island, which may be slow to answer.

    Raises:
      ArgumentError: It would have to speak TLS, and has no files for that.
    """
    if needs_tls and tls is None and not address.startswith("unix:"):
        raise ArgumentError(
            "`client_tls` must be given where islands send to each other by TLS, got "
            f'None on the way to {address}. Pass `Tls.in_folder(folder, "client")`.'
        )
    return Client(address, timeout_s=None, secret=secret, tls=tls)


class IslandService:
    """Methods of an island for its controller, and for other islands.

    Args:
      devices: Its devices.
      connect: Returns a client of another island, for its address; by default the
        secret is the file beside its socket.
      takes_recipes: Whether the process that started this one sends recipes.
      clock: Source of the time.
    """

    def __init__(
        self,
        devices: Sequence[IslandDevice],
        *,
        connect: Callable[[str], Client] = _connected,
        takes_recipes: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._devices = devices
        self._connect = connect
        self._takes_recipes = takes_recipes
        self._clock = clock or SystemClock()
        self._hosted: HostedIsland | None = None
        self._silence_s = 0.0
        self._joining = threading.Lock()  # guards these two
        self._recipes: dict[int, Future[bytes]] = {}

    @accepts()
    def describe(self) -> Data:
        """Return what a controller must know of this process and of its devices.

        Returns:
          The version of JAX, the platform, the number of this process in its group;
          kind, memory and number of the process of each device; and the group's token.
        """
        device = self._devices[0].device
        devices = [
            [each.kind, each.memory_bytes, each.process] for each in self._devices
        ]
        number = device.client.process_index()
        platform = _export_platform(device)
        return [jax.__version__, platform, number, devices, group_token()]

    @accepts(session=text(), name=text(), peers=_ADDRESSES, lost_after_s=seconds())
    def join(
        self, session: str, name: str, peers: dict[str, str], lost_after_s: float
    ) -> bool:
        """Make the island of a controller; return whether it was free.

        Args:
          session: Token of the controller's session.
          name: Name of the island there.
          peers: Addresses of the other islands, by name.
          lost_after_s: Silence after which each side gives the other up.
        """
        with self._joining:
            former = self._hosted
            if former is not None and not former.is_closed:
                if former.silent_s < self._silence_s:
                    return False
                former.give_up()
            self._silence_s = lost_after_s
            self._hosted = HostedIsland(
                name,
                self._devices,
                peers=peers,
                session=session,
                clock=self._clock,
                connect=self._connect,
            )
            return True

    @accepts(
        session=text(), number=whole(), about=_TABLE, program=blob(_MOST_PROGRAM_BYTES)
    )
    def load(self, session: str, number: int, about: Data, program: bytes) -> Data:
        """Compile a computation; return the layouts of its outputs.

        Args:
          session: The session.
          number: Number of the computation.
          about: All of it but its function.
          program: Bytes of `jax.export`; none if its recipe comes from the parent.
        """
        hosted = self._of(session)
        if program:
            run, shapes = function_of_export(program)
        elif self._takes_recipes:
            recipe = self._recipe(number).result(_RECIPE_S)
            del self._recipes[number]
            run, shapes = function_of_recipe(recipe)
        else:
            raise ArgumentError(
                "`program` must be bytes of `jax.export`, got none. Only the process "
                "that started an island sends it recipes."
            )
        return hosted.load(number, about, run, shapes)

    @accepts(session=text(), number=whole(), items=_ITEMS)
    def take(self, session: str, number: int, items: Sequence[Data]) -> None:
        """Take the next message of the sequence."""
        self._of(session).take(number, items)

    @accepts(
        session=text(),
        run=whole(),
        value=whole(),
        sender=_SENDER,
        shards=_SHARDS,
        error=_ERROR,
    )
    def deliver(
        self,
        session: str,
        run: int,
        value: int,
        sender: int | str,
        shards: Data,
        error: Data,
    ) -> None:
        """Take shards that a process of another island sends, or the error instead.

        Without shards: whether another process of this island, by name, has its own.
        """
        self._of(session).deliver((run, value), sender, shards, error)

    @accepts(session=text(), wait_s=seconds())
    def reports(self, session: str, wait_s: float) -> Data:
        """Return what was computed since the last call, and what failed."""
        return self._of(session).reports(min(wait_s, _MOST_WAIT_S))

    @accepts(session=text(), keys=_KEYS)
    def read(self, session: str, keys: Sequence[Data]) -> Data:
        """Return values that were reported."""
        return self._of(session).read([(int(run), int(n)) for run, n in keys])

    @accepts(session=text())
    def leave(self, session: str) -> None:
        """End the island after the messages so far."""
        self._of(session).close()

    def give_up(self) -> None:
        """End the island, whether its controller has left or not; returns at once."""
        with self._joining:
            if self._hosted is not None:
                self._hosted.give_up()

    def take_recipe(self, number: int, recipe: bytes) -> None:
        """Take a recipe, of the process that started this one."""
        self._recipe(number).set_result(recipe)

    def _recipe(self, number: int) -> "Future[bytes]":
        return self._recipes.setdefault(number, Future())

    def _of(self, session: str) -> HostedIsland:
        hosted = self._hosted
        if hosted is None or hosted.session != session:
            raise ArgumentError(
                "`session` must be that of the island's controller, got another. The "
                "controller was given up, or closed: connect again."
            )
        return hosted


def _export_platform(device: Device) -> str:
    """Return the platform of a device as `jax.export` names it: "gpu" is none."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


class IslandServer:
    """Offer devices of this process as an island; `controller.connect` finds it.

    It takes data, and programs as `jax.export` has them, from who knows the secret: who
    knows it has this process's devices. A context: at its end the island ends. Of a
    group that `jax.distributed` joined each process has one: together they are one
    island, with the devices of all.

    Args:
      address: Where to listen, as `rpc.Server` has it: "grpc://host:7000", "unix:/…".
      devices: Devices of JAX; all of this process by default.
      secret: Secret of all islands of a controller; by default the file beside a Unix
        socket, or the one that the environment points to.
      tls: Files of a server; needed beyond this host.
      client_tls: Files of a client, for what it sends to islands on other hosts.

    Raises:
      ArgumentError: The address is invalid.

    >>> with controller.IslandServer("unix:") as server:
    ...     with controller.connect([server.address]) as pw:
    ...         print(pw.fn(lambda x: x * 2, pw.slice(1))(jnp.ones(2)))
    [2. 2.]
    """

    def __init__(
        self,
        address: str,
        *,
        devices: Sequence[Device] | None = None,
        secret: Secret | None = None,
        tls: Tls | None = None,
        client_tls: Tls | None = None,
    ) -> None:
        accept_jax_group()  # before JAX starts: it sets what keeps CPUs from hanging
        found = jax_devices() if devices is None else list(devices)
        about = [described(device, len(found)) for device in found]
        connect = functools.partial(
            _connected, secret=secret, tls=client_tls, needs_tls=tls is not None
        )
        self._service = IslandService(about, connect=connect)
        self._server = Server(
            self._service, name="island", address=address, secret=secret, tls=tls
        )

    @property
    def address(self) -> str:
        """Where it listens, once it was started."""
        return self._server.address

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it was stopped; return whether it was."""
        return self._server.wait(timeout_s)

    def __enter__(self) -> Self:
        """Start it."""
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it; a controller that has the island loses it."""
        self._service.give_up()
        self._server.stop()
