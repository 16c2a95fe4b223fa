"""Options of a run's records, and the folder that they are written to."""

import dataclasses
import logging
from pathlib import Path

from replicator.checkpoint.buckets.url import parse_url
from replicator.checkpoint.directories.named import checked_directory
from replicator.distributed.coordination import process_index
from replicator.errors import ArgumentError, check_count, check_flags
from replicator.training.options import RunOptions
from replicator.training.reports.profiler import check_steps
from replicator.training.reports.uploads import Uploads

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Options of a run's records.

    Attributes:
      directory: Directory of metrics, `run.json` and the journal; None for none.
      uploads: Their copies in a bucket, which the user named; None for none.
      write_every: Steps between written metrics.
      display: Whether progress is shown on standard error.
      profile: Steps to trace; None for none.
    """

    directory: Path | None
    uploads: Uploads | None = None
    write_every: int
    display: bool
    profile: range | None


def recording_of(options: RunOptions) -> Recording:
    """Return the options of a run's records.

    >>> recording_of(RunOptions(steps=3)).write_every
    10

    Raises:
      ArgumentError: An option is of a wrong kind, a trace has no directory, or records
        would lie among checkpoints.
    """
    write_every, display = options.write_every, options.display
    check_count("write_every", write_every)
    check_flags(gradient_norm=options.gradient_norm, display=display)
    directory, uploads = checked_directory("directory", options.directory), None
    if isinstance(directory, str):
        uploads = _uploads(directory, options)
        directory = uploads.folder
    if (profile := options.profile) is not None:
        check_steps("profile", profile)
        if directory is None:
            raise ArgumentError(
                "`directory` must be given to profile steps, got None. Pass it: traces "
                "go to `profile/` in it."
            )
        if options.steps is not None and profile.start > options.steps:
            _log.warning(
                "No step of `profile=%s` is traced: the last step is %d.",
                profile,
                options.steps,
            )
    return Recording(
        directory=directory,
        uploads=uploads,
        write_every=write_every,
        display=display,
        profile=profile,
    )


def _uploads(directory: str, options: RunOptions) -> Uploads:
    saved = checked_directory("checkpoint_dir", options.checkpoint_dir)
    # Found at the next start otherwise: a directory of checkpoints holds nothing else.
    if isinstance(saved, str) and f"{directory}/".startswith(f"{saved}/"):
        raise ArgumentError(
            f"`directory` must lie outside of `checkpoint_dir`, got {directory} and "
            f"{saved}. Save to a folder in it: {directory}/checkpoints."
        )
    return Uploads(parse_url("directory", directory), process=process_index())
