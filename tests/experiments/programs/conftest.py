"""What the tests of the example programs share."""

import pytest

from experiments.digits import digits_arrays


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return images and labels, by split."""
    data_dir = tmp_path_factory.mktemp("datasets")
    return {s: digits_arrays(s, data_dir=data_dir) for s in ("train", "test")}
