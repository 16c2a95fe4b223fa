"""The picture of README can be drawn again."""

import pytest

from tests.controller import picture


@pytest.mark.slow
def test_the_picture_of_two_clients_is_drawn(tmp_path):
    path = tmp_path / "two_clients.svg"
    picture.main(path)
    assert path.read_text().startswith("<svg")
