"""Serve the page of a run in a thread of the launching process: uvicorn, on loopback.

uvicorn is what most Python web pages run on, released every few weeks, and needs h11
and click alone. It speaks HTTP/1.1; what is answered is the application's business.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from replicator.errors import LaunchError
from replicator.launchpad_bridge.view.dashboard.access import token_of
from replicator.launchpad_bridge.view.dashboard.application import Application
from replicator.launchpad_bridge.view.watching.found_runs import LINK, describe_run
from replicator.launchpad_bridge.view.watching.watcher import Watcher
from replicator.rpc.security.private_files import create_private
from replicator.rpc.security.secret import Secret

if TYPE_CHECKING:
    import uvicorn

_HOST = "127.0.0.1"
_LAST_WORDS_S = 2
_START_S = 10.0
_MOST_AT_ONCE = 32
_LONGEST_HEAD_BYTES = 16 * 1024
_LOG = logging.getLogger("replicator.launchpad_bridge")


@final
class Dashboard:
    """The page of one run, from `start` until `close`.

    Attributes:
      link: What opens it; whoever has it sees the program.
    """

    def __init__(self, folder: Path) -> None:
        """Take a port of this host; nothing is served yet.

        Args:
          folder: Of the run, with its secret and its description.

        Raises:
          LaunchError: uvicorn is not installed.
          OSError: There is no port.
        """
        _check_installed()
        run_id = describe_run(folder)["run_id"]
        token = token_of(Secret.read(folder / "secret"), run_id)
        self._watcher = Watcher(folder)
        self._socket = socket.create_server((_HOST, 0))
        port = self._socket.getsockname()[1]
        self.link = f"http://{_HOST}:{port}/{token}/"
        with open(create_private(folder / LINK), "w") as file:
            file.write(self.link)
        self._make = lambda: Application(self._watcher, token=token, port=port)
        self._serves = threading.Event()
        self._ends: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread = threading.Thread(
            target=self._serve, name="program dashboard", daemon=True
        )

    def start(self) -> None:
        """Serve, and print the link."""
        self._thread.start()
        self._serves.wait(_START_S)
        print(f"{self._watcher.graph.program}: look at {self.link}", flush=True)

    def close(self) -> None:
        """Send who looks on how the program ended; leave no thread, no port."""
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._serves.wait(_START_S)
            if self._ends is not None:
                loop, end = self._ends
                with contextlib.suppress(RuntimeError):  # it has broken down before
                    loop.call_soon_threadsafe(end.set)
            self._thread.join(2 * _LAST_WORDS_S + 1.0)
        self._watcher.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            _LOG.exception("%s: the dashboard broke down", self._watcher.graph.program)
        finally:
            self._serves.set()
            self._socket.close()

    async def _run(self) -> None:
        end = asyncio.Event()
        application = self._make()
        server = _server_of(application)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        self._ends = asyncio.get_running_loop(), end
        self._serves.set()
        ending = asyncio.create_task(end.wait())
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        application.close()
        server.should_exit = True
        ending.cancel()
        await serving


def _check_installed() -> None:
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as missing:
        raise LaunchError(
            "`dashboard=True` must have uvicorn, got none installed. Run "
            "`pip install 'jax-replicator[dashboard]'`."
        ) from missing


def _server_of(application: Application) -> "uvicorn.Server":
    """Return a server that keeps to itself: no log, signal or setting of the process.

    `access_log=False` would take the handlers of uvicorn's loggers away from a user who
    serves something else here, and not keep the token out of every log.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Discreet(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.access_log = False  # each line would hold the token

    config = uvicorn.Config(
        application,
        http=Discreet,
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=None,
        proxy_headers=False,  # nobody speaks for others
        server_header=False,
        limit_concurrency=_MOST_AT_ONCE,
        h11_max_incomplete_event_size=_LONGEST_HEAD_BYTES,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    return uvicorn.Server(config)
