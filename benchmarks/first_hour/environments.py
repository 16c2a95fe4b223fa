"""Mistakes in the environment: half-set variables, devices that are not there."""

from benchmarks.first_hour.mistake import mistake

_RUN = """
import replicator
replicator.Replicator()
"""
_JOIN = """
import replicator
replicator.distributed.initialize()
"""

ENVIRONMENTS = (
    mistake(
        "fake devices that are not a number",
        "import replicator",
        "`REPLICATOR_FAKE_DEVICES`",
        "'eight'",
        remedy="Set it to 8",
        environment={"REPLICATOR_FAKE_DEVICES": "eight"},
        bare=True,
    ),
    mistake(
        "no fake devices",
        "import replicator",
        "`REPLICATOR_FAKE_DEVICES`",
        "'0'",
        remedy="Set it to 8",
        environment={"REPLICATOR_FAKE_DEVICES": "0"},
        bare=True,
    ),
    mistake(
        "a GPU that is not there",
        _RUN,
        "`JAX_PLATFORMS`",
        "'cuda'",
        remedy="unset it",
        environment={"JAX_PLATFORMS": "cuda"},
        report="jax-ml/jax#23208",
        bare=True,
    ),
    mistake(
        "a TPU that is not there",
        _RUN,
        "`JAX_PLATFORMS`",
        "'tpu'",
        remedy="unset it",
        environment={"JAX_PLATFORMS": "tpu"},
        report="jax-ml/jax#12642",
        bare=True,
    ),
    mistake(
        "a platform that does not exist",
        _RUN,
        "`JAX_PLATFORMS`",
        "'cuda12'",
        remedy="unset it",
        environment={"JAX_PLATFORMS": "cuda12"},
        report="jax-ml/jax#25315",
        bare=True,
    ),
    mistake(
        "a number of processes without the rest",
        _JOIN,
        "`REPLICATOR_PROCESS_ID`",
        remedy="Set",
        environment={"REPLICATOR_NUM_PROCESSES": "2"},
        quiet=True,
        bare=True,
    ),
    mistake(
        "a coordinator without the rest",
        _JOIN,
        "`REPLICATOR_NUM_PROCESSES`",
        remedy="Set",
        environment={"REPLICATOR_COORDINATOR": "127.0.0.1:1234"},
        quiet=True,
        bare=True,
    ),
    mistake(
        "a process beyond their number",
        _JOIN,
        "`REPLICATOR_PROCESS_ID`",
        "2",
        remedy="Number processes from 0",
        environment={
            "REPLICATOR_COORDINATOR": "127.0.0.1:1234",
            "REPLICATOR_NUM_PROCESSES": "2",
            "REPLICATOR_PROCESS_ID": "2",
        },
        bare=True,
    ),
    mistake(
        "one of several processes that does not join them",
        _RUN,
        "initialize",
        remedy="Call",
        environment={
            "REPLICATOR_COORDINATOR": "127.0.0.1:1234",
            "REPLICATOR_NUM_PROCESSES": "2",
            "REPLICATOR_PROCESS_ID": "0",
        },
        quiet=True,
        bare=True,
    ),
    mistake(
        "a kind of traceback that is none",
        _RUN,
        "`REPLICATOR_TRACEBACK`",
        "'all'",
        remedy="Set it to 'full'",
        environment={"REPLICATOR_TRACEBACK": "all", "REPLICATOR_FAKE_DEVICES": "2"},
        quiet=True,
        bare=True,
    ),
)
