"""Raise an error in another thread, which ends its Python code."""

import ctypes
import threading


def raise_in_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread, at its next instruction of Python.

    One that waits in foreign code (a lock, a socket, a sleep) notices when that
    returns.
    """
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(error)
        )
