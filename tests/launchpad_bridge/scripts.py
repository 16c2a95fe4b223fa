"""Run scripts that launch programs, and look at how they end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """
import os, signal, sys, threading, time
import replicator.launchpad_bridge as lp
from tests.launchpad_bridge.programs import *
"""
LIMIT_S = 180.0


def command(body):
    return [sys.executable, "-c", HEAD + textwrap.dedent(body)]


def start(body):
    """Start a script whose output is read line by line."""
    return subprocess.Popen(
        command(body),
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body):
    """Run a script to its end; return its status, output and errors."""
    with start(body) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        return process.returncode, out, err
