"""A process behind a pipe, as behind ssh: bytes, codes, signals, and nothing left."""

import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.remote import member as member_module
from replicator.distributed.report_progress import write_progress
from tests.distributed.remote.one_host import HAS_CHILD, LONG_S, parent, wait_gone
from tests.multiprocess.worker_processes import wait_until

AWKWARD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$HOME",
    "`x`",
    "\n",
    "\\",
    '{"a": [1]}',
    "-é\udcff",
]


def test_arguments_and_variables_arrive_byte_for_byte(host):
    variables = {f"NAME{i}": text for i, text in enumerate(AWKWARD)}
    code = (
        "import json, os, sys\n"
        "open('got', 'w').write(json.dumps([sys.argv[1:], dict(os.environ)]))"
    )
    host.start(code, *AWKWARD, environment=variables)
    assert host.end().code == 0
    arguments, environ = json.loads((host.folder / "got").read_text())
    assert arguments == AWKWARD
    assert {name: environ[name] for name in variables} == variables


def test_words_are_the_same_bytes_in_any_locale_of_a_host(host, tmp_path):
    make = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", f"{tmp_path}/latin"]
    if not shutil.which("localedef") or subprocess.run(make, check=False).returncode:
        pytest.skip("no locale of Latin letters can be made")
    code = (
        "import os, sys\n"
        "words = [sys.getfilesystemencoding(), *sys.argv[1:], os.environ['NAME']]\n"
        "open('got', 'w').write(' '.join(os.fsencode(each).hex() for each in words))"
    )
    latin = f"LOCPATH={tmp_path} LC_ALL=latin {{}}"
    host.start(code, "é", "日", environment={"NAME": "é"}, shell=latin)
    assert host.end().code == 0
    got = (host.folder / "got").read_text().split()
    assert bytes.fromhex(got[0]) == b"iso8859-1"
    assert [bytes.fromhex(each).decode() for each in got[1:]] == ["é", "日", "é"]


def test_output_arrives_byte_for_byte_behind_that_of_a_login_shell(host, capfdbinary):
    code = (
        "import sys\n"
        "sys.stdout.buffer.write(b'\\0\\xff one\\n' + b'x' * 300_000 + b'\\nlast')\n"
        "print('Traceback (most recent call last):', file=sys.stderr)\n"
        "sys.exit('ValueError: 7')"
    )
    host.start(code, shell="echo Welcome; {}")
    end = host.end()
    out, err = capfdbinary.readouterr()
    lines = [line.removeprefix(b"[1] ") for line in out.split(b"\n")]
    assert lines[0] == b"\0\xff one"
    assert b"".join(lines[1:-2]) == b"x" * 300_000
    assert lines[-2:] == [b"last", b""]
    assert b"[1] ValueError: 7\n" in err
    assert end.code == 1
    assert end.last_lines[-1] == b"ValueError: 7"


@pytest.mark.parametrize("code", [0, 75, 255])
def test_a_process_ends_with_its_own_code(host, code):
    host.start(f"raise SystemExit({code})")
    assert host.end().code == code


def test_the_signal_that_killed_a_process_is_known(host):
    host.start("import os; os.kill(os.getpid(), 9)")
    assert host.end().code == -signal.SIGKILL


def test_a_stop_is_the_signal_that_was_asked_for(host):
    member = host.start(HAS_CHILD)
    pids = host.here()
    member.stop()
    assert host.end().code == -signal.SIGTERM
    wait_gone(pids)


def test_a_kill_ends_all_that_left_the_session(host):
    member = host.start(HAS_CHILD)
    pids = host.here()
    member.kill()
    assert host.end().code == KILLED_BY_LAUNCHER
    wait_gone(pids)


def test_a_host_that_is_silent_is_lost(host):
    host.start(HAS_CHILD, lost_after_s=3.0)
    os.kill(host.here()[1], signal.SIGSTOP)
    assert b"silent for 3 s" in host.end().last_lines[0]


def test_a_connection_that_is_cut_is_lost(host):
    member = host.start(HAS_CHILD)
    os.kill(parent(host.here()[1]), signal.SIGKILL)
    assert b"`b` is lost: cut off" in host.end().last_lines[0]
    assert member.was_used


def test_progress_that_cannot_be_written_down_hides_no_end(host):
    (host.folder / "file").write_text("")
    host.start(
        "import os; open(os.environ['REPLICATOR_PROGRESS_FILE'], 'w').write('7')",
        progress=lambda step: write_progress(host.folder / "file" / "7", step),
    )
    assert host.end().code == 0


def test_a_terminal_that_holds_up_the_launcher_loses_no_host(host, monkeypatch):
    stalled_s = 0.0

    class Terminal:
        def write(self, data):
            nonlocal stalled_s
            if b"warning" in data and not stalled_s:
                # Until the host has sent a beat; and far longer, as clocks show it.
                select.select([host.members[0]._pipes[0][0]], [], [], LONG_S)
                stalled_s = 1000.0

        def flush(self):
            pass

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stalled_s)
    monkeypatch.setattr(member_module, "time", clock)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=Terminal()))
    warn = f"while ! [ -e {host.folder}/here ]; do sleep 0.01; done; echo warning >&2"
    host.start(HAS_CHILD, lost_after_s=8.0, shell=f"({warn}) & {{}}")
    process, _, _ = host.here()
    wait_until(lambda: stalled_s)
    os.kill(process, signal.SIGKILL)
    assert host.end().code == -signal.SIGKILL


def test_the_next_attempt_ends_what_is_left_of_the_one_before(host):
    host.start(HAS_CHILD)
    pids = host.here()
    host.start("print('next')")
    assert {host.end().code for _ in range(2)} == {0, -signal.SIGKILL}
    wait_gone(pids)


def test_another_run_on_the_host_is_left_alone(host):
    host.start(HAS_CHILD)
    pids = host.here()
    host.start("print('other')", owner=f"{host.owner}0")
    assert host.end().code == 0
    assert all(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_secret_is_in_a_file_of_this_user_alone_and_gone_afterwards(host):
    secret = os.urandom(32)
    code = (
        "import os, pathlib, stat\n"
        "path = os.environ['REPLICATOR_RPC_SECRET_FILE']\n"
        "held = [pathlib.Path('/proc', str(pid), name).read_bytes()\n"
        "        for pid in (os.getpid(), os.getppid())\n"
        "        for name in ('cmdline', 'environ')]\n"
        "secret = pathlib.Path(path).read_bytes()\n"
        "secrets = (secret, secret.hex().encode())\n"
        "shown = any(secret in each for secret in secrets for each in held)\n"
        "modes = [oct(stat.S_IMODE(os.stat(each).st_mode))\n"
        "         for each in (path, os.path.dirname(path))]\n"
        "print(secret.hex(), shown, modes, file=open('got', 'w'))"
    )
    host.start(code, secret=secret.hex())
    assert host.end().code == 0
    got = (host.folder / "got").read_text().strip()
    assert got == f"{secret.hex()} False ['0o600', '0o700']"
    left = pathlib.Path(tempfile.gettempdir()).glob(f"{host.owner}*")
    wait_until(lambda: not list(left))


def test_progress_is_reported_before_the_end(host):
    host.start(
        "import os; open(os.environ['REPLICATOR_PROGRESS_FILE'], 'w').write('7')"
    )
    assert host.end().code == 0
    assert host.steps.get_nowait() == 7


def test_a_folder_that_a_host_lacks_is_named(host):
    host.start("", directory="/no/such/folder")
    end = host.end()
    assert end.comes_again
    assert b"No such file or directory: /no/such/folder" in end.last_lines[0]


def test_a_host_without_free_disk_is_named(host):
    host.start("", secret="00" * 4096, shell="ulimit -f 1; {}")
    assert b"free disk, got 'File too large'" in host.end().last_lines[0]


def test_a_python_that_a_host_lacks_is_named(host):
    host.start("", shell="/no/python # {}")
    end = host.end()
    assert end.comes_again
    assert b"Name its environment as `python_venv`" in end.last_lines[0]


@pytest.mark.parametrize("frames", [r"1\377\377\377\377", r"e\000\000\000\001x"])
def test_a_host_that_sends_no_frames_is_lost(host, frames):
    preamble = r"\000replicator frames follow\n"
    host.start("", shell=f"printf '{preamble}{frames}'; sleep 600 # {{}}")
    assert host.end().code == 1


def test_a_stop_before_the_host_answers_waits_for_nothing(host):
    member = host.start("", shell="sleep 600 # {}")
    member.stop()
    member.kill()
    assert host.end().code == -signal.SIGTERM
