"""Commit, replace, delete and sweep checkpoints in a bucket, which has no rename.

A checkpoint is what its manifest names: `<step>/manifest.json` is put last, if absent,
and deleted first. A writer that dies in between leaves a state without a manifest. A
sweep must not take for one what a plain tool is still copying here, so each writer
first puts an **intent**: the states at one step that go unless the manifest names them.
An intent holds the URL of its directory: a copy of one, elsewhere, is left alone.

TensorStore puts each object by one request: there are no uploads in parts to sweep.
"""

import dataclasses
import json
import os
import re

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.manifest import MANIFEST_NAME
from replicator.errors import CheckpointInUseError

_INTENTS = ".intents/"
_NEWEST = ".newest"  # object with the step that was committed last
_MANIFEST = re.compile(rf"(\d{{12}})/{re.escape(MANIFEST_NAME)}")
# Format 1 calls it `state`. A manifest lists its files with the folder before them.
_STATE = re.compile(r'"(state(?:-[0-9a-f]{8})?)/')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """States of one step that are to go, unless the step's manifest names them.

    Attributes:
      key: Key of the intent's own object.
      url: URL of the directory.
      step: Step.
      states: Names of the states.
      replaced: Manifest that the step had before, or None.
    """

    key: str
    url: str
    step: int
    states: tuple[str, ...]
    replaced: str | None = None


def folder(step: int) -> str:
    """Return the folder of a step, as on disk.

    >>> folder(7)
    '000000000007'
    """
    return f"{step:012d}"


def manifest_key(step: int) -> str:
    """Return the key of the manifest of a step.

    >>> manifest_key(7)
    '000000000007/manifest.json'
    """
    return f"{folder(step)}/{MANIFEST_NAME}"


def list_steps(bucket: Bucket) -> list[int]:
    """List the steps that have a manifest, in order."""
    found = map(_MANIFEST.fullmatch, bucket.list())
    steps = {int(match[1]) for match in found if match}
    # A stale list lacks the newest, and a run would go on from an older one.
    newest = int(bucket.read(_NEWEST) or -1)
    if newest not in steps and newest >= 0 and bucket.read(manifest_key(newest)):
        steps.add(newest)
    return sorted(steps)


def begin(bucket: Bucket, step: int, state: str, *, generation: int) -> Intent:
    """Announce that a state will be written, before its first object is.

    Args:
      bucket: Bucket.
      step: Step.
      state: Name of the state: `state-` and eight random hex digits.
      generation: Generation of the writer.
    """
    key = f"{_INTENTS}{generation:012d}-{os.urandom(4).hex()}.json"
    intent = Intent(key=key, url=f"{bucket.url}", step=step, states=(state,))
    _put(bucket, intent)
    return intent


def publish(bucket: Bucket, intent: Intent, manifest: bytes) -> None:
    """Make a checkpoint of a state that is there whole.

    Args:
      bucket: Bucket, whose newest writer calls this.
      intent: From `begin`.
      manifest: Manifest, which names the state.

    Raises:
      CheckpointInUseError: Another writer has put its manifest meanwhile.
      BucketError: The bucket failed; the manifest may be there, or come still.
    """
    key = manifest_key(intent.step)
    before = bucket.read(key)
    if before is not None and before != manifest:
        # A run that went back to an earlier step saves the same step again.
        old = before.decode()
        states = (*intent.states, *_states(old))
        intent = dataclasses.replace(intent, states=states, replaced=old)
        _put(bucket, intent)
        bucket.delete(key)
    if not bucket.put_if_absent(key, manifest):
        raise CheckpointInUseError(
            f"`{bucket.url}/{key}` must be written by this run alone, got one that "
            "another has put there meanwhile. End one of the two runs."
        )
    bucket.put(_NEWEST, b"%d" % intent.step)
    _settle(bucket, intent, manifest.decode())


def delete(bucket: Bucket, step: int, *, generation: int) -> None:
    """Delete a checkpoint; its manifest first, so that a part is never read as one."""
    manifest = bucket.read(manifest_key(step))
    if manifest is None:
        return
    key = f"{_INTENTS}{generation:012d}-{os.urandom(4).hex()}.json"
    states = tuple(_states(manifest.decode()))
    intent = Intent(key=key, url=f"{bucket.url}", step=step, states=states)
    _put(bucket, intent)
    bucket.delete(manifest_key(step))
    _settle(bucket, intent, "")


def abandon(bucket: Bucket, intent: Intent) -> None:
    """Delete what was written of a state whose manifest was never put."""
    _settle(bucket, intent, "")


def sweep(bucket: Bucket, *, generation: int) -> list[str]:
    """Remove what writers before `generation` left unfinished; return its names.

    A checkpoint that made room for one that was never finished is put back.
    """
    done: list[str] = []
    for key in bucket.list(_INTENTS):
        data = bucket.read(key)
        if data is None or _generation(key) >= generation:
            continue
        intent = Intent(key=key, **json.loads(data))
        if intent.url != f"{bucket.url}":  # a copy: what it names may still be coming
            continue
        there = bucket.read(manifest_key(intent.step))
        if there is None and intent.replaced is not None:
            there = intent.replaced.encode()
            bucket.put_if_absent(manifest_key(intent.step), there)
        done += _settle(bucket, intent, (there or b"").decode())
    return done


def _settle(bucket: Bucket, intent: Intent, manifest: str) -> list[str]:
    """Delete the states of an intent that the manifest does not name; then it."""
    named = _states(manifest)
    name = folder(intent.step)
    gone = [f"{name}/{state}" for state in intent.states if state not in named]
    for each in gone:
        bucket.delete_all(f"{each}/")
    bucket.delete(intent.key)
    return gone


def _states(manifest: str) -> list[str]:
    return sorted(set(_STATE.findall(manifest)))


def _put(bucket: Bucket, intent: Intent) -> None:
    fields = dataclasses.asdict(intent)
    del fields["key"]
    bucket.put(intent.key, strict_json(fields).encode())


def _generation(key: str) -> int:
    return int(key.removeprefix(_INTENTS).split("-")[0])
