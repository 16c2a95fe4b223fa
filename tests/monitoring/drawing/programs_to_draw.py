"""Programs of different shapes, to be drawn: what the laws of pictures are put to."""

import random

import replicator.launchpad_bridge as lp

HOSTILE = "<script>alert(1)</script>&\"'`"


class Service:
    def __init__(self, *others):
        pass

    def ping(self):
        return "pong"


def work(*others):
    pass


def one():
    return lp.make_program(lp.PyNode(work), name="one")


def cycle():
    program = lp.Program("cycle")
    nodes = [lp.CourierNode(Service) for _ in range(3)]
    for label, node in zip("abc", nodes, strict=True):
        program.add_node(node, label=label)
    for node, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.configure(other.create_handle())
    return program


def training():
    program = lp.Program("training")
    replay = program.add_node(lp.CourierNode(Service), label="replay")
    learner = program.add_node(lp.CourierNode(Service, replay), label="learner")
    with program.group("actors"):
        for _ in range(6):
            program.add_node(lp.PyNode(work, replay, [learner]))
    program.add_node(lp.PyNode(work, learner), label="evaluator")
    program.add_node(lp.PyNode(work), label="lonely")
    return program


def rows():
    program = lp.Program("rows")
    with program.group("shards"):
        shards = [program.add_node(lp.CourierNode(Service)) for _ in range(5)]
    with program.group("workers"):
        for shard in shards:
            program.add_node(lp.PyNode(work, shard))
    with program.group("readers"):
        for _ in range(3):
            program.add_node(lp.PyNode(work, *shards))
    return program


def ring():
    program = lp.Program("ring")
    nodes = [lp.CourierNode(Service) for _ in range(4)]
    with program.group("ring"):
        for node in nodes:
            program.add_node(node)
    for node, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.configure(other.create_handle())
    return program


def peers():
    program = lp.Program("peers")
    nodes = [lp.CourierNode(Service) for _ in range(4)]
    with program.group("peers"):
        for node in nodes:
            program.add_node(node)
    for node in nodes:
        node.configure(*[other.create_handle() for other in nodes if other is not node])
    return program


def forty():
    chance, handles = random.Random(3), []
    program = lp.Program("forty")
    for number in range(40):
        known = [chance.choice(handles) for _ in range(chance.randrange(3)) if handles]
        node = lp.CourierNode(Service, *known)
        handles.append(program.add_node(node, label=f"node {number}"))
    return program


def colocated():
    program = lp.Program("colocated")
    server = lp.CourierNode(Service)
    handle = server.create_handle()
    inner = lp.MultiThreadingColocation([server, lp.PyNode(work, handle)])
    program.add_node(inner, label="both")
    return program


def hostile():
    program = lp.Program(HOSTILE)
    service = type(HOSTILE, (Service,), {})
    handle = program.add_node(lp.CourierNode(service), label=HOSTILE)
    program.add_node(lp.PyNode(work, handle), label="x" * 99)
    program.add_node(lp.PyNode(work, handle), label="\0\x1b\ud800 end\n subgraph")
    return program


SHAPES = (one, cycle, training, rows, ring, peers, forty, colocated, hostile)
