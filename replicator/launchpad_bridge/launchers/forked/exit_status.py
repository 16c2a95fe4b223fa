"""Say how a process ended, from what the kernel tells its parent."""

import os
import signal


def describe_status(status: int, *, out_of_memory: bool = False) -> str:
    """Return "was killed by SIGSEGV", "exited with code 3" and the like.

    Args:
      status: As `os.waitpid` returns it.
      out_of_memory: Whether the kernel killed something for memory meanwhile.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    text = f"was killed by {_signal_name(-code)}"
    if -code != signal.SIGKILL:
        return text
    if out_of_memory:
        return f"{text}: the machine was out of memory"
    return f"{text}, not by its launcher"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
