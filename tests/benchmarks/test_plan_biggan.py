"""Plans of BigGAN and ResNet: what is kept of compilers."""

from benchmarks import plan_biggan
from replicator.strategies import Machine


def test_each_case_is_kept_with_what_compiled_it():
    kept = plan_biggan.read()
    for name, case in plan_biggan.CASES.items():
        found = plan_biggan.kept_outcome(kept, name)
        machine = Machine.from_topology(case.topology)
        assert set(found.versions) == {"jax", "libtpu"}, name
        if found.features is not None:
            assert found.features.num_devices == machine.num_devices, name
