"""Access to the page: only with its link, from this host, under its own name.

The link holds a token that only the program's secret makes. It is part of the path, so
each request has it, and no cookie is set, which other ports of the host would share. A
page elsewhere whose name resolves to this host (DNS rebinding) sends that name as
`Host`, and is refused before anything else is checked.

Pure: a request's parts in, a status out.
"""

import hmac
from collections.abc import Mapping, Sequence

from replicator.rpc.security.secret import Secret

OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 200, 400, 403, 404, 405
METHODS = ("GET", "HEAD")
HEADERS: Mapping[str, str] = {
    # The browser itself refuses all other requests of the page, or of a name in it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",  # the path is the key
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def token_of(secret: Secret, run_id: str) -> str:
    """Return the token of a run's page, which does not reveal the secret."""
    return secret.sign(f"replicator dashboard\0{run_id}".encode()).hex()


def check(
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    *,
    token: str,
    port: int,
) -> tuple[int, str]:
    """Return the status of a request, and the file of the page that it names.

    Args:
      method: Method of the request.
      path: Path as it was sent, not decoded.
      headers: Lower-case names, and values.
      token: Token of the page.
      port: Port of the page.

    >>> check("GET", "/key/page.js", [(b"host", b"localhost:80")], token="key", port=80)
    (200, 'page.js')
    >>> check("GET", "/key/", [(b"host", b"evil.example")], token="key", port=80)
    (403, '')
    """
    names = {f"{host}:{port}".encode() for host in ("127.0.0.1", "localhost")}
    hosts = [value for name, value in headers if name == b"host"]
    origins = [value for name, value in headers if name == b"origin"]
    if len(hosts) != 1 or hosts[0] not in names:
        return FORBIDDEN, ""
    if any(origin not in {b"http://" + name for name in names} for origin in origins):
        return FORBIDDEN, ""
    _, _, rest = path.partition("/")
    given, slash, asked = rest.partition("/")
    # Bytes: of text only ASCII can be compared.
    if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        return FORBIDDEN, ""
    if not slash:
        return NOT_FOUND, ""
    return (OK, asked) if method in METHODS else (NOT_ALLOWED, "")
