"""What workers of the tests run. Light to import: each of them does."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SLEEPER = "import time; time.sleep(1000)"


def give(value):
    return lambda context: value


def add(context):
    import numpy as np

    return {"sum": np.arange(5).sum(), "array": np.ones((300, 1000), np.float32)}


def give_thread(context):
    return threading.current_thread()


def fail(context):
    print("before it fails")
    error = ValueError("a bug")
    error.add_note("On the edge tested -> other")
    raise error


def terminate_child(context):
    """Fork as a pool does, and end that as a pool does; return how it ended."""
    import multiprocessing

    def run():
        os.write(ready, b"x")  # a signal before this may be lost to Python's fork
        time.sleep(1000)

    reading, ready = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    os.read(reading, 1)
    child.terminate()
    child.join(60)
    child.kill()
    context.stop_event.wait(0.5)
    return child.exitcode


def fail_in_silence(context):
    raise ValueError("a bug")


def close_output(how, then=None):
    """Print, close what is printed to, and return how."""

    def run(context):
        print("before it is closed", end="")
        for number, name in enumerate(["stdout", "stderr"], start=1):
            match how:
                case "close":
                    getattr(sys, name).close()
                case "descriptor":
                    os.close(number)
                case "none":
                    setattr(sys, name, None)
        return how if then is None else then(context)

    return run


def leave(code):
    return lambda context: sys.exit(code)


def leave_hard(code):
    return lambda context: os._exit(code)


def kill_itself(number):
    def run(context):
        print("last words")
        os.kill(os.getpid(), number)
        time.sleep(1000)

    return run


def crash_at_exit(context):
    import atexit

    atexit.register(os.abort)
    return 1


def sleep(seconds=1000):
    return lambda context: time.sleep(seconds)


def wait_for_stop(context):
    context.stop_event.wait()
    return f"{context.worker} of {context.program} was stopped"


def tell_and_wait(path):
    """Tell the process id, then wait for the stop."""

    def run(context):
        tell(path, os.getpid())
        return wait_for_stop(context)

    return run


def tell_and_stop_late(path):
    """Tell the process id, then the stop; end after a SIGTERM that comes behind it."""

    def run(context):
        tell(path, os.getpid())
        context.stop_event.wait()
        before = signal.getsignal(signal.SIGTERM)
        tell(f"{path}.asked", "1")
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.01)

    return run


def tell_and_sleep(path):
    def run(context):
        tell(path, os.getpid())
        time.sleep(1000)

    return run


def ask_for_stop(context):
    threading.Thread(target=context.stop_program).start()
    return wait_for_stop(context)


def have_children(path, *, then):
    """Start a child, one in a session of its own, and one whose parent is gone."""

    def run(context):
        python = [sys.executable, "-c", SLEEPER]
        near = subprocess.Popen(python)
        far = subprocess.Popen(python, start_new_session=True)
        forked = os.fork()
        if not forked:
            os.setsid()
            orphan = subprocess.Popen(python)
            tell(f"{path}.orphan", orphan.pid)
            os._exit(0)
        os.waitpid(forked, 0)
        orphan = Path(f"{path}.orphan").read_text()
        tell(path, f"{near.pid} {far.pid} {orphan}")
        then(context)

    return run


def environment(*names):
    return lambda context: [os.environ.get(name) for name in names]


def draw(context):
    import random

    import numpy as np

    return random.random(), float(np.random.random())


def default_dtype(context):
    import jax.numpy as jnp

    return str(jnp.ones(()).dtype)


def surroundings(context):
    return sys.argv, os.getcwd(), threading.active_count()


def leave_a_thread(context):
    threading.Thread(target=time.sleep, args=(0.5,), name="slow one").start()


def print_lines(context):
    for number in range(1000):
        print(f"line {number}")
    print("to the other", file=sys.stderr)


def own_interpreter(context):
    return sys.orig_argv


def ignore_sigterm(path):
    def run(context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(path, os.getpid())
        time.sleep(1000)

    return run


def tell(path, value):
    """Write a file that is whole once it is there."""
    draft = Path(f"{path}.draft")
    draft.write_text(str(value))
    draft.rename(path)


def print_much(path):
    def run(context):
        for _ in range(20):
            print("x" * 1_000_000)
        tell(path, "done")

    return run


def loaded_dashboard(context):
    import replicator.launchpad_bridge  # noqa: F401

    return [name for name in sys.modules if "dashboard" in name]


def wait_in_program():
    import replicator.launchpad_bridge as lp

    lp.wait_for_stop()
