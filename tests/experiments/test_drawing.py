import numpy as np
import pytest
from matplotlib.image import imread

from experiments.drawing import draw_curves, draw_frames, draw_scores


@pytest.mark.parametrize("episodes", [[], [(0, -1.0)], [(k, k % 3) for k in range(50)]])
def test_a_curve_of_any_number_of_episodes_is_drawn(episodes, tmp_path):
    path = tmp_path / "new" / "curve.png"
    draw_curves({"a": episodes, "b": [(3, 1.0)]}, path, title="curve", window=10)
    assert imread(path).shape == (480, 720, 4)


def test_what_chance_gains_is_drawn_beside_a_curve(tmp_path):
    for name, chance in (("without", None), ("with", -20.2)):
        draw_curves(
            {"pong": [(0, -21.0), (1, 3.0)]},
            tmp_path / f"{name}.png",
            title="curve",
            window=1,
            chance=chance,
        )
    without, drawn = (imread(tmp_path / f"{n}.png") for n in ("without", "with"))
    assert np.any(without != drawn)


def test_scores_of_several_lines_are_told_apart(tmp_path):
    one = {8: [0.2, 0.3], 64: [0.1]}
    draw_scores(
        {"left": {"a": one, "b": {2: [0.5], 8: [0.4]}}, "right": {"": one}},
        tmp_path / "scores.png",
        ylabel="score",
        baseline=0.2,
    )
    left, right = np.split(imread(tmp_path / "scores.png")[..., :3], 2, axis=1)
    orange = np.array([255, 127, 14]) / 255  # of the second line
    near = [(np.abs(half - orange).max(axis=2) < 0.1).sum() for half in (left, right)]
    assert near[0] > 50
    assert near[1] == 0


def test_a_strip_shows_pictures_side_by_side(tmp_path):
    frames = [np.zeros((10, 5)), np.ones((10, 5))] * 20
    draw_frames(frames, tmp_path / "strip.png", title="strip", most=4)
    height, width, _ = imread(tmp_path / "strip.png").shape
    assert width > height
