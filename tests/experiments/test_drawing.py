import numpy as np
import pytest
from matplotlib.image import imread

from experiments.drawing import draw_curves, draw_frames


@pytest.mark.parametrize("episodes", [[], [(0, -1.0)], [(k, k % 3) for k in range(50)]])
def test_a_curve_of_any_number_of_episodes_is_drawn(episodes, tmp_path):
    path = tmp_path / "new" / "curve.png"
    draw_curves({"a": episodes, "b": [(3, 1.0)]}, path, title="curve", window=10)
    assert imread(path).shape == (480, 720, 4)


def test_a_strip_shows_pictures_side_by_side(tmp_path):
    frames = [np.zeros((10, 5)), np.ones((10, 5))] * 20
    draw_frames(frames, tmp_path / "strip.png", title="strip", most=4)
    height, width, _ = imread(tmp_path / "strip.png").shape
    assert width > height
