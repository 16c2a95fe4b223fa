"""A script with a group of processes, to be killed: `doomed_group.py FOLDER`."""

import sys

import replicator.launchpad_bridge as lp
from tests.multiprocess import group_nodes as nodes


def main(folder):
    program = lp.Program("doomed")
    node = lp.JaxProcesses(nodes.hang, folder, processes=2)
    with program.group("learner", resources=nodes.CPU):
        program.add_node(node)
    lp.launch(program, "processes").wait()


if __name__ == "__main__":
    main(sys.argv[1])
