"""Reasons that a host could not be used, from what ssh printed, each with a remedy."""

import re
from collections.abc import Sequence

_KNOWN = (
    (
        "has changed and you have requested",
        "show the key that ssh knows of it",
        "Somebody may stand in for it: ask who runs it, and only then `ssh-keygen -R`",
    ),
    (
        "Host key verification failed|No .* host key is known",
        "have a key that ssh knows",
        "Run `ssh` to it once, and compare the fingerprint",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "take your key, without a password",
        "Use `ssh-copy-id`, add the key to the agent, or name its `key_file`",
    ),
    (
        "Could not resolve hostname",
        "have a name that resolves",
        "Correct its `address`, or name it in `~/.ssh/config`",
    ),
    (
        "timed out|Connection refused|No route to host|Network is unreachable",
        "answer",
        "Start it and its sshd, or correct its `address` and `port`",
    ),
    (
        # As shells word it; other files may be missing in a login that works.
        "(?i)python.*(not found|no such file|permission denied)"
        "|(not found|no such file|unknown command).*python|python must be",
        "have Python 3.11 or newer at the same path",
        "Name its environment as `python_venv`",
    ),
)
# At the first start these are mistakes as well; later on they may pass.
_MAY_PASS = ("answer", "have a name that resolves")


def describe_unusable(
    host: str, printed: Sequence[str], *, was_used: bool
) -> tuple[str, bool]:
    """Describe why a process could not be started on a host.

    Args:
      host: Name of the host.
      printed: Lines that ssh, or the shell of the host, printed.
      was_used: Whether it could be in an earlier attempt.

    Returns:
      One line, and whether the next attempt would end the same way.

    >>> describe_unusable("b", ["Host key verification failed."], was_used=True)
    ("host `b` must have a key that ssh knows, got 'Host key verification failed.'. \
Run `ssh` to it once, and compare the fingerprint.", True)
    """
    for pattern, rule, remedy in _KNOWN:
        shown = [line for line in printed if re.search(pattern, line)]
        if shown:
            text = f"host `{host}` must {rule}, got {shown[-1].strip()!r}. {remedy}."
            return text, not (was_used and rule in _MAY_PASS)
    shown = printed[-1].strip() if printed else "nothing"
    text = f"host `{host}` must start its process, got {shown!r} from what reaches it."
    return f"{text} Try `ssh {host} true`.", False
