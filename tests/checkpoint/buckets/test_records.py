"""Records of a run in a bucket: written on this host, uploaded, gone on with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runs.faulty_buckets import BUCKET
from replicator.checkpoint import disk
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.url import parse_url
from replicator.cli import main as cli
from replicator.errors import ArgumentError, BucketError, CheckpointInUseError
from replicator.hooks import Hook, StateCallback, every
from replicator.training.reports import uploads as module
from replicator.training.reports.uploads import Uploads
from tests.cli.look.report_page.runs import make_run
from tests.steps import run_plainly


@pytest.fixture(autouse=True)
def on_host(tmp_path, monkeypatch):
    """Continue on the host of a name, which has files of its own."""

    def change(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    change("first")
    return change


@pytest.fixture
def url(kind, tmp_path):
    """A directory in a bucket of each kind."""
    if kind == "file":
        return f"file://{tmp_path}/bucket/run"
    return f"{kind}://{BUCKET}/{tmp_path.name}/run"


@pytest.fixture
def s3_url(s3, tmp_path):
    return f"s3://{BUCKET}/{tmp_path.name}/run"


def run(directory, steps=2, **options):
    return run_plainly(steps, directory=directory, write_every=1, **options)


def opened(url):
    return Bucket(parse_url("url", url))


def lines(url, name):
    data = opened(url).read(name) or b""
    return [json.loads(line) for line in data.splitlines()]


def kinds(url):
    return [event["kind"] for event in lines(url, "events.jsonl")]


def steps_in(url, name="metrics.jsonl"):
    return [row["step"] for row in lines(url, name)]


def begun(url, process=0):
    """Return uploads of records whose thread is not started."""
    uploads = Uploads(parse_url("url", url), process=process)
    uploads.folder.mkdir(parents=True, exist_ok=True)
    return uploads


def test_records_of_a_run_are_in_its_bucket(url):
    run(url)
    assert steps_in(url) == [1, 2]
    assert kinds(url)[0] == "started"
    assert kinds(url)[-1] == "ended"
    assert json.loads(opened(url).read("run.json"))["seed"] == 0


def test_a_run_goes_on_in_its_records_on_another_host(s3_url, tmp_path, on_host):
    saved = {"checkpoint_dir": tmp_path / "saved"}
    run(s3_url, **saved)
    on_host("second")
    run(s3_url, steps=4, **saved)
    assert steps_in(s3_url) == [1, 2, 3, 4]
    assert [k for k in kinds(s3_url) if k in ("started", "resumed")] == [
        "started",
        "resumed",
    ]


@pytest.mark.slow
def test_another_run_sets_the_earlier_records_aside(s3_url, on_host):
    run(s3_url)
    on_host("second")
    run(s3_url, steps=3)
    on_host("third")
    run(s3_url, steps=1)
    assert steps_in(s3_url) == [1]
    assert steps_in(s3_url, "earlier/0/metrics.jsonl") == [1, 2]
    assert steps_in(s3_url, "earlier/1/metrics.jsonl") == [1, 2, 3]
    assert kinds(s3_url).count("started") == 1


def test_a_bucket_that_fails_later_ends_no_run(s3, s3_url, tmp_path, caplog):
    def fail(event):
        # The fault of puts that is not tried again: no limit has to be waited for.
        s3.disturb = lambda method, path: "404" if method == "PUT" else None

    hooks = [StateCallback(fail, every(n_steps=1))]
    saved = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": 1}
    assert run(s3_url, steps=3, hooks=hooks, **saved).step == 3
    assert caplog.text.count("Records stay here, and the run goes on") == 1
    assert "files of records are not in" in caplog.text
    s3.disturb = lambda method, path: None
    assert steps_in(s3_url) == []
    run(s3_url, steps=3, **saved)  # nothing is left to do but that
    assert steps_in(s3_url) == [1, 2, 3]


def test_rows_are_in_the_bucket_before_their_step_is_saved(
    s3_url, tmp_path, monkeypatch
):
    found = []

    def look(operation, path):
        if path.name == "manifest.json":  # about to be written: it ends a save
            found.append(steps_in(s3_url))

    monkeypatch.setattr(module, "_EVERY_S", 1000.0)
    monkeypatch.setattr(disk, "_ignore", look)
    run(s3_url, steps=2, checkpoint_dir=tmp_path / "saved")
    assert found[0] == [1, 2]


def test_what_a_kill_left_here_goes_to_the_bucket_with_the_next_run(s3_url):
    killed = begun(s3_url)
    killed.fetch(*killed.acquire())
    (killed.folder / "events.jsonl").write_text('{"kind": "hung"}\n')
    after = begun(s3_url)
    after.fetch(*after.acquire())
    with after:
        pass
    assert kinds(s3_url) == ["hung"]


def test_what_is_here_from_before_another_hosts_run_is_dropped(s3_url, on_host):
    for host, text in (("first", "1"), ("second", "2"), ("first", None)):
        on_host(host)
        uploads = begun(s3_url)
        uploads.fetch(*uploads.acquire())
        with uploads:
            if text is not None:
                (uploads.folder / "metrics.jsonl").write_text(text)
                (uploads.folder / f"only-{host}").write_text(text)
    assert (uploads.folder / "metrics.jsonl").read_text() == "2"
    assert not (uploads.folder / "only-first").exists()


def test_a_process_goes_on_in_its_own_journal(s3_url):
    bucket = opened(s3_url)
    for name in ("events.jsonl", "events.1.jsonl", "metrics.jsonl"):
        bucket.put(name, name.encode())
    uploads = begun(s3_url, process=1)
    uploads.fetch("", "own")
    names = [path.name for path in uploads.folder.glob("[!.]*")]
    assert names == ["events.1.jsonl"]


def test_a_file_that_has_not_changed_is_not_put_again(s3, s3_url):
    uploads = begun(s3_url)
    uploads.fetch(*uploads.acquire())
    with uploads:
        (uploads.folder / "a").write_text("1")
        uploads.flush()
        (uploads.folder / "b").write_text("1")
        uploads.flush()
        uploads.flush()
    puts = [path for method, path in s3.requests if method == "PUT"]
    assert [sum(path.endswith(f"run/{n}") for path in puts) for n in "ab"] == [1, 1]


def test_a_run_from_another_host_takes_over(s3_url, on_host, caplog):
    first = begun(s3_url)
    first.fetch(*first.acquire())
    with first:
        on_host("second")
        second = begun(s3_url)
        second.fetch(*second.acquire())
        (first.folder / "metrics.jsonl").write_text("first")
        first.flush()
    assert opened(s3_url).read("metrics.jsonl") is None
    assert "must have this run as its only writer" in caplog.text


class RunsAnother(Hook):
    """Runs a second run inside of a first one."""

    def __init__(self, url):
        self._url = url

    def on_end(self, event):
        with pytest.raises(CheckpointInUseError, match="must have one writer"):
            run(self._url)


def test_a_second_run_on_this_host_is_refused(s3_url):
    run(s3_url, hooks=[RunsAnother(s3_url)])
    assert kinds(s3_url).count("started") == 1


def test_a_bucket_that_refuses_ends_a_run_before_its_first_step(s3, s3_url):
    s3.disturb = lambda method, path: "403"
    with pytest.raises(BucketError, match="must be open to this process"):
        run(s3_url, hooks=[StateCallback(pytest.fail, every(n_steps=1))])


def test_records_do_not_lie_among_checkpoints(s3_url):
    with pytest.raises(ArgumentError, match="`directory` must lie outside of"):
        run(f"{s3_url}/records", checkpoint_dir=s3_url)


@pytest.mark.slow
def test_checkpoints_may_lie_among_records(s3_url):
    saved = {"checkpoint_dir": f"{s3_url}/saved"}
    run(s3_url, **saved)
    run(s3_url, steps=3, **saved)
    assert steps_in(s3_url) == [1, 2, 3]


def test_a_report_is_made_from_a_bucket(s3_url, tmp_path):
    made, bucket, page = make_run(tmp_path / "made"), opened(s3_url), tmp_path / "page"
    for path in filter(Path.is_file, made.rglob("*")):
        bucket.put(path.relative_to(made).as_posix(), path.read_bytes())
    assert cli.main(["report", s3_url, "-o", str(page)]) == 0
    assert "started" in page.read_text()


HANG = """
import logging, sys, threading, replicator
import jax.numpy as jnp
from replicator.hooks import StateCallback, every
from replicator.options import Limits

def step_fn(state, batch):
    return state + 1, {}

replicator.Replicator().run(
    step_fn, [{"x": jnp.zeros(1)}], init_fn=lambda key: jnp.zeros(()), steps=2,
    hooks=[StateCallback(lambda event: threading.Event().wait(), every(n_steps=1))],
    directory=sys.argv[1], display=False, step_timeout=Limits(report_s=1),
)
"""


@pytest.mark.slow
def test_stacks_of_a_hang_are_uploaded(tmp_path):
    url = f"file://{tmp_path}/bucket"
    done = subprocess.run(
        [sys.executable, "-c", HANG, url], check=False, timeout=300, capture_output=True
    )
    assert done.returncode == 76, done.stderr.decode()
    assert opened(url).list("stacks/") != []
    assert kinds(url)[-1] == "hung"
