import pickle

import pytest

import replicator.launchpad_bridge as lp


def test_an_object_is_made_once_when_it_is_asked_for():
    made = []
    deferred = lp.Deferred(lambda *args: made.append(args) or made, 1, 2)
    assert made == []
    assert deferred.dereference() is deferred.dereference()
    assert made == [(1, 2)]


def test_deferred_arguments_are_made_first():
    assert lp.Deferred(list, lp.Deferred(tuple, "ab")).dereference() == ["a", "b"]


def test_a_constructor_that_raises_is_told_with_the_place_of_the_deferred():
    deferred = lp.Deferred(int, "no number")
    with pytest.raises(
        RuntimeError, match=r"Error \(.*\) occurred when evaluating"
    ) as e:
        deferred.dereference()
    assert "test_deferred.py" in str(e.value)
    assert isinstance(e.value.__cause__, ValueError)


def test_it_is_pickled_as_a_recipe_not_as_what_it_made():
    deferred = lp.Deferred(list, "ab")
    made = deferred.dereference()
    twin = pickle.loads(pickle.dumps(deferred))
    assert twin.dereference() == made
    assert twin.dereference() is not made
