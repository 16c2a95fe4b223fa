"""Launchpad's launch types, and our names for them."""

import enum

from replicator.errors import ArgumentError


class LaunchType(enum.Enum):
    """Launchpad's launch types; `LaunchType("threads")` finds one by our name too."""

    LOCAL_MULTI_THREADING = "local_mt"
    LOCAL_MULTI_PROCESSING = "local_mp"
    TEST_MULTI_PROCESSING = "test_mp"
    TEST_MULTI_THREADING = "test_mt"
    LOCAL_DOCKER = "local_docker"
    VERTEX_AI = "vertex_ai"
    RAY = "ray"

    @classmethod
    def _missing_(cls, value: object) -> "LaunchType | None":
        return _BY_OUR_NAME.get(value) if isinstance(value, str) else None


_BY_OUR_NAME = {
    "threads": LaunchType.LOCAL_MULTI_THREADING,
    "processes": LaunchType.LOCAL_MULTI_PROCESSING,
    "test": LaunchType.TEST_MULTI_THREADING,
}
_OUR_NAMES = {
    LaunchType.LOCAL_MULTI_THREADING: "threads",
    LaunchType.LOCAL_MULTI_PROCESSING: "processes",
    LaunchType.TEST_MULTI_THREADING: "test",
    LaunchType.TEST_MULTI_PROCESSING: "processes",
    LaunchType.RAY: "ray",
}
_LOCAL = {LaunchType.LOCAL_MULTI_THREADING, LaunchType.LOCAL_MULTI_PROCESSING}
_TESTS = {LaunchType.TEST_MULTI_THREADING, LaunchType.TEST_MULTI_PROCESSING}


def launch_type_of(launch_type: LaunchType | str) -> LaunchType:
    """Return the launch type of that name, ours or Launchpad's.

    Raises:
      ArgumentError: There is none.

    >>> launch_type_of("threads") is launch_type_of("local_mt")
    True
    """
    try:
        return LaunchType(launch_type)
    except ValueError:
        known = sorted({*_BY_OUR_NAME, *(known.value for known in LaunchType)})
        raise ArgumentError(
            f"`launch_type` must be one of {', '.join(known)}, got {launch_type!r}. "
            "Use one of these, or pass a launcher of your own."
        ) from None


def launcher_name(launch_type: LaunchType) -> str:
    """Return the name of the launcher behind a launch type.

    Raises:
      ArgumentError: There is none for it here.

    >>> launcher_name(LaunchType.LOCAL_MULTI_PROCESSING)
    'processes'
    """
    if launch_type not in _OUR_NAMES:
        raise ArgumentError(
            f"`launch_type` must be one that runs without Google's services, got "
            f"{launch_type.value!r}. Use 'ray' for a cluster, 'processes' for a host."
        )
    return _OUR_NAMES[launch_type]


def is_test(launch_type: LaunchType) -> bool:
    """Return whether a failure is raised in the test that launched the program.

    >>> is_test(LaunchType.TEST_MULTI_THREADING)
    True
    """
    return launch_type in _TESTS


def is_local_launch(launch_type: LaunchType | str) -> bool:
    """Return whether it runs on this host, and is not a test.

    >>> is_local_launch("threads"), is_local_launch("test"), is_local_launch("ray")
    (True, False, False)
    """
    return launch_type_of(launch_type) in _LOCAL


def is_local_launch_or_test(launch_type: LaunchType | str) -> bool:
    """Return whether it runs on this host.

    >>> is_local_launch_or_test("test"), is_local_launch_or_test("ray")
    (True, False)
    """
    return launch_type_of(launch_type) in _LOCAL | _TESTS
