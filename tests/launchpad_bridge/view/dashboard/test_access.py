import pytest

from replicator.launchpad_bridge.view.dashboard.access import HEADERS, check, token_of
from replicator.rpc.security.secret import Secret

TOKEN, PORT = "ab" * 32, 4711
HOST = (b"host", b"127.0.0.1:4711")


def status(path=f"/{TOKEN}/", *, method="GET", headers=(HOST,)):
    return check(method, path, headers, token=TOKEN, port=PORT)[0]


@pytest.mark.parametrize("asked", ["", "page.js", "feed", "a/b", "../x"])
def test_with_the_link_all_of_the_page_may_be_asked_for(asked):
    answer = check("GET", f"/{TOKEN}/{asked}", [HOST], token=TOKEN, port=PORT)
    assert answer == (200, asked)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "//",
        "/page.js",
        "/feed",
        "/favicon.ico",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}0/",
        f"/{TOKEN.upper()}/",
        f"/{TOKEN[:-1]}\u00e9/",
        f"/x/{TOKEN}/",
        f"//{TOKEN}/",
        f"/../{TOKEN}/",
        f"/?token={TOKEN}",
        f"http://127.0.0.1:4711/{TOKEN}/",
        f"/%61{TOKEN[1:]}/",
    ],
)
def test_without_the_token_nothing_is_told(path):
    assert status(path) == 403


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:4711",
        b"127.0.0.1",
        b"127.0.0.1:4712",
        b"127.0.0.1:4711.evil.example",
        b"127.0.0.1.evil.example:4711",
        b"localhost.evil.example:4711",
        b"[::1]:4711",
        b"0.0.0.0:4711",
        b"2130706433:4711",
        b"LOCALHOST:4711 ",
        b"",
    ],
)
def test_another_name_for_this_host_is_refused_though_the_token_is_right(host):
    assert status(headers=[(b"host", host)]) == 403


def test_one_host_must_be_named_and_one_only():
    assert status(headers=[]) == 403
    assert status(headers=[HOST, (b"host", b"evil.example")]) == 403
    assert status(headers=[HOST, HOST]) == 403


def test_localhost_is_a_name_of_this_host():
    assert status(headers=[(b"host", b"localhost:4711")]) == 200


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b""])
def test_scripts_of_other_pages_are_refused(origin):
    assert status(headers=[HOST, (b"origin", origin)]) == 403


def test_a_script_of_the_page_itself_is_not():
    assert status(headers=[HOST, (b"origin", b"http://127.0.0.1:4711")]) == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"])
def test_the_page_is_for_reading(method):
    assert status(method=method) == 405
    # Who has no token is not even told that.
    assert status("/", method=method) == 403


def test_a_token_is_of_one_run_and_does_not_tell_the_secret():
    secret = Secret.generate()
    tokens = {token_of(secret, run) for run in ("a", "b")}
    assert len(tokens) == 2
    assert token_of(secret, "a") in tokens
    assert token_of(Secret.generate(), "a") not in tokens
    assert {len(token) for token in tokens} == {64}


def test_the_browser_is_told_to_refuse_what_the_page_does_not_need():
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert HEADERS["referrer-policy"] == "no-referrer"
    assert HEADERS["cache-control"] == "no-store"
