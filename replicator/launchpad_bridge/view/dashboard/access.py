"""Who may see the page: whoever has the link, from this host, under its own name.

The link holds a token that only the program's secret makes. It stands in the path, so
each request has it, and no cookie is set, which other ports of the host would share. A
page elsewhere that lets its own name point to this host (DNS rebinding) sends that name
as `Host`, and is refused before anything else is looked at.

Pure: a request's parts in, a status out.
"""

import hmac
from collections.abc import Mapping, Sequence

from replicator.rpc.security.secret import Secret

OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 200, 400, 403, 404, 405
METHODS = ("GET", "HEAD")
HEADERS: Mapping[str, str] = {
    # The browser itself refuses whatever the page, or a name in it, might ask for.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",  # the path is what opens it
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def token_of(secret: Secret, run_id: str) -> str:
    """Return what opens the page of a run; it does not tell the secret."""
    return secret.sign(f"replicator dashboard\0{run_id}".encode()).hex()


def check(
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    *,
    token: str,
    port: int,
) -> tuple[int, str]:
    """Return the status of a request, and what of the page it asks for.

    Args:
      method: Of the request.
      path: As it was sent, not decoded.
      headers: Lower-case names, and values.
      token: Of the page.
      port: That it is served at.
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
