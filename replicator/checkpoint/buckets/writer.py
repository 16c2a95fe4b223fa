"""The right to write to a bucket: the newest writer has it, all before it are shut out.

Each writer puts an object named by its generation, if absent: one generation has one
writer, whatever a list may have missed. There is no lock that a dead writer frees, so a
new writer takes over from one that lives, which finds that out before its next commit
(a fencing token: Kleppmann, "How to do distributed locking", 2016).
"""

from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.lock import Owner, decode_owner, encode_owner, new_owner
from replicator.errors import CheckpointInUseError


class BucketWriter:
    """The right to write to a bucket, once `acquire` has returned.

    Args:
      bucket: Bucket.
      folder: Prefix of the objects that name the writers.

    Attributes:
      tokens: Tokens of the owner before this one, empty if there was none, and of this
        one, once `acquire` has returned.
    """

    def __init__(self, bucket: Bucket, *, folder: str = ".writer/"):
        self._bucket = bucket
        self._folder = folder
        self._owner: Owner | None = None
        self.tokens = "", ""

    def acquire(self, *, above: int) -> int:
        """Become the owner; whoever was it commits no more.

        Args:
          above: Highest generation that has committed.

        Returns:
          The generation of this owner.

        Raises:
          BucketError: The bucket cannot be written to.
        """
        self._bucket.mark()
        names = self._bucket.list(self._folder)
        generation = max([above, *map(self._generation_of, names)])
        while True:
            # A stale list may show too few; none is deleted, so the next one is free.
            generation += 1
            owner = new_owner(generation)
            if self._bucket.put_if_absent(self._key(generation), encode_owner(owner)):
                break
        before = decode_owner(self._bucket.read(self._key(generation - 1)) or b"")
        self._owner = owner
        self.tokens = before.token if before else "", owner.token
        return generation

    @property
    def generation(self) -> int:
        """Generation of this owner."""
        assert self._owner is not None, "called by the owner alone"
        return self._owner.generation

    def require_current(self) -> None:
        """Raise if there is a newer owner, or the directory was made anew.

        Raises:
          CheckpointInUseError: There is, or it was.
          BucketError: The bucket does not answer.
        """
        generation = self.generation
        newer = self._bucket.read(self._key(generation + 1))
        own = self._bucket.read(self._key(generation))
        if newer is None and self._owner and own == encode_owner(self._owner):
            return
        after = decode_owner(newer) if newer else None
        raise CheckpointInUseError(
            f"`{self._bucket.url}` must have this run as its only writer, got "
            f"{after or 'others'} after it. Nothing more is saved here: end this run."
        )

    def release(self) -> None:
        """Let others become the owner; they need nothing of us for it."""
        self._owner = None

    def _key(self, generation: int) -> str:
        return f"{self._folder}{generation:012d}.json"

    def _generation_of(self, key: str) -> int:
        stem = key.removeprefix(self._folder).removesuffix(".json")
        return int(stem) if stem.isdecimal() else 0
