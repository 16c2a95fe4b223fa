"""What is made of Ray's words; they are Ray 2.60's."""

import pytest

from replicator.launchpad_bridge.launchers.on_ray.lost_actor import how_actor_was_lost

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: _WorkerActor
\tactor_id: 0c40628576df40c72d066acf02000000
\tpid: 2193
\tname: node#0
\tnamespace: replicator-f26782d204ea
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR \
Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of \
file. Some common causes include: (1) the process was killed by the OOM killer."""
HOST_GONE = """The actor died unexpectedly before finishing this task.
\tpid: 7
\tip: 10.0.0.2
The actor is dead because its node has died. Node Id: 35dbf1470eb5."""
RAISED = """The actor died because of an error raised in its creation task, \
\x1b[36mray::node#0:_WorkerActor.__init__()\x1b[39m (pid=2349, ip=127.0.0.1)
           ^^^^^^^^^^^^^^^^^^^
  File "pathlib.py", line 1116, in mkdir
NotADirectoryError: [Errno 20] Not a directory: '/logs'"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            KILLED,
            "is lost, as its actor died (process 2193 on 127.0.0.1). Ray reports: "
            "Worker unexpectedly exits with a connection error code 2. End of file.",
        ),
        (
            HOST_GONE,
            "is lost, as its actor died (process 7 on 10.0.0.2). Ray reports: its node "
            "has died. Node Id: 35dbf1470eb5.",
        ),
        (
            RAISED,
            "could not be started on its host: NotADirectoryError: [Errno 20] Not a "
            "directory: '/logs'",
        ),
        ("Anything\nelse.", "is lost, as its actor died. Ray reports: Anything else."),
        ("", "is lost, as its actor died. Ray reports: nothing"),
    ],
    ids=["killed", "host gone", "raised", "other", "nothing"],
)
def test_one_line_tells_of_it(text, told):
    assert how_actor_was_lost(text) == told
