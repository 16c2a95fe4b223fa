"""A user's script: `pickling_script.py LAUNCHER METHOD CHILD`.

Its node pickles what the script defines, by itself and for pools of a method. CHILD is
the method of a process that launches the program instead of the script; "" for none.
"""

import functools
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import replicator.launchpad_bridge as lp


class Point(NamedTuple):
    x: int


def double(point):
    return Point(2 * point.x)


@functools.lru_cache
def square(number):
    return number * number


def work(method):
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        [two] = pool.map(double, [Point(1)])
        assert pool.map(square, [3]) == [9]
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        four = pool.submit(double, two).result()
    return isinstance(four, Point), four.x


def launch(launcher, method):
    with lp.launch(lp.make_program(lp.PyNode(work, method)), launcher) as run:
        run.wait(100)
    print("found", run.results["node0"], flush=True)


if __name__ == "__main__":
    launcher, method, child = sys.argv[1:]
    if child:
        context = multiprocessing.get_context(child)
        process = context.Process(target=launch, args=(launcher, method))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    launch(launcher, method)
