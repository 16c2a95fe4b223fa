"""Stop requests in a node: by waiting, by an event, by a handler."""

import inspect
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from replicator.errors import LaunchError, check_not_async
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.running.node_context import RunningContext
from replicator.launchpad_bridge.running.stop_event import StopEvent

_LOG = logging.getLogger(__name__)
# Guards `_OF_PROCESS`; no handler is called while it is held.
_LOCK = threading.Lock()
_OF_PROCESS: list[Callable[..., Any]] = []


def wait_for_stop(timeout_secs: float | None = None) -> bool:
    """Wait until the program is asked to stop, or the time is over.

        while not lp.wait_for_stop(5.0):
            ...  # every five seconds, until the program stops

    Args:
      timeout_secs: Longest wait; None for as long as the program runs, 0 for none.

    Returns:
      True if the program is asked to stop.

    Raises:
      LaunchError: This thread belongs to no node.
    """
    return stop_event().wait(timeout_secs)


def stop_event() -> StopEvent:
    """Return the event that is set when this node is asked to stop.

    Raises:
      LaunchError: This thread belongs to no node.

    >>> def work():                       # in a node
    ...     stop = lp.stop_event()
    ...     while not stop.is_set():
    ...         lp.stop()
    ...     return "stopped"
    >>> with lp.launch(lp.make_program(lp.PyNode(work))) as run:
    ...     run.wait()
    >>> run.results["node0"]
    'stopped'
    """
    context = node_context.current()
    if context is None:
        raise LaunchError(
            "Worker manager is only available from the Launchpad's program node "
            "thread. Ask for `lp.stop_event()` there, and hand it to other threads."
        )
    return context.stop_event


def register_stop_handler(handler: Callable[..., Any]) -> None:
    """Register a function to call once, when the program is asked to stop.

    In a node: when that node is asked, in a thread of its own; the worker waits for
    it, and its error fails the node. Elsewhere: when a program that this process
    launched is asked.

    Args:
      handler: Takes no arguments, or those of a signal handler.

    Raises:
      ArgumentError: It is an `async def`.

    >>> def work():
    ...     lp.register_stop_handler(lambda: print("saving"))
    ...     lp.stop()
    ...     lp.wait_for_stop()
    >>> with lp.launch(lp.make_program(lp.PyNode(work))) as run:
    ...     run.wait()
    saving
    """
    check_not_async("handler", handler)
    context = node_context.current()
    if context is None:
        with _LOCK:
            _OF_PROCESS.append(handler)
        return
    registered = _StopHandler(context, handler)
    # Listed before it can be called: the worker waits for all that are listed.
    context.stop_handlers.append(registered)
    registered.cancel = context.stop_event.when_set(registered.start)


def unregister_stop_handler(handler: Callable[..., Any]) -> None:
    """Remove a registered function; do nothing if it is not registered."""
    context = node_context.current()
    for registered in [] if context is None else context.stop_handlers:
        if registered.handler == handler and registered.take_over():
            registered.done.set()
            return
    with _LOCK:
        if handler in _OF_PROCESS:
            _OF_PROCESS.remove(handler)


def call_process_handlers() -> None:
    """Call and remove the handlers that were registered outside of nodes."""
    with _LOCK:
        handlers, _OF_PROCESS[:] = list(_OF_PROCESS), []
    for handler in handlers:
        try:
            call_handler(handler)
        except Exception:
            _LOG.exception("the stop handler %r raised", handler)


def call_handler(handler: Callable[..., Any]) -> None:
    """Call a stop handler without arguments, or with those of a signal handler.

    >>> call_handler(lambda signum, frame: print(signum.name))
    SIGTERM
    """
    try:
        inspect.signature(handler).bind()
    except TypeError:
        handler(signal.SIGTERM, None)
    except ValueError:  # a builtin without a signature
        handler()
    else:
        handler()


def finish_handlers(context: RunningContext) -> None:
    """Wait at the end of a node for its handlers; raise the first error of one.

    The wait has no bound of its own: a worker that does not end within the run's grace
    is killed.
    """
    for registered in context.stop_handlers:
        registered.cancel()
        if not context.stop_event.is_set():
            continue
        # The event wakes the node before it has started all handlers.
        if registered.take_over():
            registered.call()
        registered.done.wait()
    for registered in context.stop_handlers:
        if registered.error is not None:
            raise registered.error


class _StopHandler:
    """A function that is called once, by the first thread that takes it over."""

    def __init__(self, context: RunningContext, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.cancel: Callable[[], None] = lambda: None
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._context = context
        # Never released: the thread that gets it calls the handler, or cancels it.
        self._taken = threading.Lock()

    def take_over(self) -> bool:
        """Return whether the caller is the one to call it."""
        return self._taken.acquire(blocking=False)

    def start(self) -> None:
        """Call it in a thread: the thread that sets the event must not wait."""
        if self.take_over():
            name = f"{self._context.worker} stop handler"
            # Ends with the handler; `finish_handlers` waits for `done`.
            threading.Thread(target=self.call, name=name, daemon=True).start()

    def call(self) -> None:
        """Call it; keep its error."""
        try:
            self._context.applied_to(call_handler)(self.handler)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()
