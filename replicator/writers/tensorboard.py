"""Write numbers as TensorBoard event files, through tensorboardX.

Install the extra `tensorboard`. Only tensorboardX's synchronous event file is used: its
`SummaryWriter.flush` does not wait for the queue before that file (2.6.5).
"""

import itertools
import os
import time
from collections.abc import Mapping

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.paths import checked_path
from replicator.base.optional_package import optional_package

_files_of_this_process = itertools.count()


class TensorBoard:
    """Write scalars to a new event file in a folder.

    Args:
      directory: The folder; a resumed run may use that of the run before.
      clock: Clock for the time of an event.

    Raises:
      ArgumentError: `directory` is not a path.
      ImportError: tensorboardX is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, clock: Clock | None = None
    ):
        directory = checked_path("directory", directory)
        with optional_package("TensorBoard", "tensorboardX", extra="tensorboard"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        # protobuf makes these classes at run time, where pyright does not see them.
        self._new_event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._new_summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._clock = clock or SystemClock()
        # TensorBoard orders by the time of day; from here on our own clock counts.
        self._epoch_s = time.time() - self._clock.now_s()
        directory.mkdir(parents=True, exist_ok=True)
        # tensorboardX names files by the second: the suffix keeps ours apart.
        self._file = EventsWriter(
            os.path.join(directory, "events"),
            f".{os.getpid()}.{next(_files_of_this_process)}",
        )
        self._closed = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one event that holds all scalars of a step."""
        self._file.write_event(
            self._new_event(
                wall_time=self._epoch_s + self._clock.now_s(),
                step=step,
                summary=self._new_summary(
                    value=[
                        {"tag": name, "simple_value": number}
                        for name, number in scalars.items()
                    ]
                ),
            )
        )

    def flush(self) -> None:
        """Return when all events are in the file."""
        if not self._closed:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if not self._closed:
            self._closed = True
            self._file.close()
