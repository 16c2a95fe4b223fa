"""Dataflows over islands of this process: values, order, errors, memory."""

import contextlib
import copy
import gc
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import replicator
from replicator import Replicator, controller, strategies
from replicator.controller.islands.cpu_clients import cpu_client_devices
from replicator.engine.run_ahead import MOST_ON_CPU
from replicator.errors import ArgumentError, OpFailedError

ONES = np.ones(2, np.float32)


@contextlib.contextmanager
def connected(islands, devices):
    """Islands of this process that are served, so that all is sent to them as data."""
    with contextlib.ExitStack() as stack:
        made = [cpu_client_devices(number, devices) for number in range(islands)]
        servers = [controller.IslandServer("unix:", devices=each) for each in made]
        addresses = [stack.enter_context(server).address for server in servers]
        yield stack.enter_context(controller.connect(addresses, lost_after_s=300))


MAKERS = {"local": controller.local, "connect": connected}


@pytest.fixture(
    scope="module", params=["local", pytest.param("connect", marks=pytest.mark.slow)]
)
def pw(request):
    with MAKERS[request.param](islands=3, devices=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def here():
    """Islands of this process, where a test reaches into them."""
    with controller.local(islands=3, devices=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def ops(pw):
    return figure_2(pw, 2)


def figure_2(pw, devices):
    a = pw.fn(lambda x: x * 2.0, pw.slice(devices, island="island0"))
    b = pw.fn(lambda x: x + 1.0, pw.slice(devices, island="island1"))
    c = pw.fn(lambda x: x / 2.0, pw.slice(devices, island="island2"))
    return a, b, c


def traced(pw, ops):
    a, b, c = ops

    @pw.program
    def f(v):
        x = a(v)
        return b(x), a(c(x))

    return f


def values(tree):
    return jax.tree.map(lambda future: np.asarray(future).tolist(), tree)


def test_figure_2_has_its_values(pw, ops):
    y, z = traced(pw, ops)(np.array([1.0, 2.0]))
    assert str(y), str(z) == ("[3. 5.]", "[2. 4.]")


def test_the_listing_of_pathways_runs(pw):
    def get_devices(n):
        return pw.make_virtual_device_set().add_slice(tpu_devices=n).tpus

    a = pw.pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = pw.pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = pw.pmap(lambda x: x / 2.0, devices=get_devices(2))

    @pw.program
    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    assert values(f(np.array([1.0, 2.0]))) == ([3.0, 5.0], [2.0, 4.0])


def test_pmap_sums_over_its_axis(pw):
    total = pw.pmap(
        lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=pw.slice(2).devices
    )
    assert values(total(np.array([1.0, 2.0]))) == [3.0, 3.0]


def test_the_graph_is_equal_for_any_number_of_devices(pw, ops):
    def text(pw, ops):
        lines = str(traced(pw, ops).dataflow(ONES)).splitlines()
        # Slices have numbers in each controller.
        return [line.partition("[")[2] for line in lines]

    with controller.local(islands=3, devices=8) as eight:
        assert text(eight, figure_2(eight, 8)) == text(pw, ops)


def test_a_dataflow_prints_its_devices_and_bytes_and_draws_itself(pw, ops):
    flow = traced(pw, ops).dataflow(ONES)
    assert "send float32[2], 16 bytes, island0:0,1 to island1:0,1" in flow.physical()
    assert flow.to_svg().count('class="worker"') == 4


def test_neighbours_on_a_slice_are_one_computation(pw):
    double = pw.fn(lambda x: x * 2, pw.slice(1))

    def chain(x):
        for _ in range(4):
            x = double(x)
        return x

    fused, apart = pw.program(chain), pw.program(chain, fuse=False)
    counts = [each.dataflow(ONES).physical().count(" on ") for each in (fused, apart)]
    assert counts == [2, 5]
    assert values(fused(ONES)) == values(apart(ONES)) == [16.0, 16.0]


def test_an_op_does_not_join_where_another_slice_would_wait(pw, ops):
    a, b, _ = ops
    flow = pw.program(lambda x: (b(y := a(x)), a(y))).dataflow(ONES)
    assert flow.physical().count("lambda on island0") == 2


def test_gradients_and_batches_equal_those_of_one_device(pw):
    first = pw.fn(lambda w, x: jnp.tanh(x @ w), pw.slice(2), P(None, "devices"))
    second = pw.fn(lambda w, x: ((x @ w) ** 2).mean(), pw.slice(1))

    def loss(ws, x, first, second):
        return second(ws[1], first(ws[0], x)) * 2.0

    ws = (np.ones((4, 6), np.float32) / 3, np.ones((6, 2), np.float32) / 5)
    x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)

    def gradients(first, second):
        return lambda ws, x: jax.grad(loss)(ws, x, first, second)

    def each(first, second):
        return jax.vmap(lambda ws, x: loss(ws, x, first, second), (None, 0))

    ours = first, second
    plain = (
        lambda w, x: jnp.tanh(x @ w),
        lambda w, x: ((x @ w) ** 2).mean(),
    )
    got = pw.program(gradients(*ours))(ws, x)
    for one, other in zip(got, gradients(*plain)(ws, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    got = pw.program(each(*ours))(ws, x[:, None])
    np.testing.assert_allclose(got, each(*plain)(ws, x[:, None]), rtol=1e-5)
    backward = str(pw.program(gradients(*ours)).dataflow(ws, x))
    assert backward.count("= lambda(") == 4


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_a_compiled_step_is_an_op_with_equal_bits(here, strategy):
    builder = getattr(strategies, strategy)
    chosen = builder() if strategy == "data_parallel" else builder(whole_below_bytes=0)

    def step_fn(state, batch):
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["w"])
        grads = replicator.all_reduce(grads)
        return {"w": state["w"] - 0.1 * grads}, {"norm": (grads**2).sum()}

    def trained(devices, wrap):
        rep = Replicator(devices=devices, strategy=chosen)
        state = rep.init(lambda key: {"w": jnp.arange(4.0)})
        return wrap(rep.compile(step_fn)), state

    batch = {"x": np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)}
    on = here.slice(2)
    op, state = trained(on.devices, lambda step: here.fn(step, on))
    for _ in range(2):
        state, metrics = op(state, batch)
    step, wanted = trained(jax.devices()[:2], lambda step: step)
    for _ in range(2):
        wanted, wanted_metrics = step(wanted, batch)
    assert values((state, metrics)) == values((wanted, wanted_metrics))


def failing(x):
    def fail(x):
        raise ValueError("no such luck")

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_an_error_names_op_island_and_line_and_does_not_wait(here):
    # Until the error is read, the other input of `add` runs.
    go_on = threading.Event()

    def wait(x):
        go_on.wait(60)
        return np.asarray(x)

    fail = here.fn(failing, here.slice(1, island="island0"))
    late = here.fn(
        lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        here.slice(1, island="island1"),
    )
    add = here.fn(lambda x, y: x + y, here.slice(1, island="island2"))

    @here.program
    def f(v):
        good = late(v)
        return add(fail(v), good), good

    bad, good = f(ONES)
    behind = add(bad, ONES)
    try:
        with pytest.raises(OpFailedError, match="no such luck") as raised:
            behind.result(60)
        assert not good.done()
    finally:
        go_on.set()
    assert (raised.value.op, raised.value.island) == ("failing", "island0")
    assert "test_controller.py" in raised.value.line
    assert values(good) == [1.0, 1.0]


def test_a_future_that_nobody_keeps_frees_its_memory(here):
    a, _, _ = figure_2(here, 2)
    kept = a(ONES)
    kept.result()
    island = kept._island
    before = len(island._values)
    for _ in range(5):
        a(a(ONES))
    gc.collect()
    values(a(kept))  # after all that was dropped
    gc.collect()
    values(kept)
    here.put(ONES, kept.slice).result()
    assert len(island._values) <= before + 2


def test_a_call_that_needs_a_value_runs_op_by_op(pw, ops):
    a, b, _ = ops

    @pw.program
    def f(x):
        y = a(x)
        if float(y[0]) > 1:
            y = b(y)
        return a(y + 1)

    assert values(f(ONES)) == [8.0, 8.0]


def test_stray_operations_go_with_the_op_that_takes_them(pw, ops):
    a, b, _ = ops
    flow = pw.program(lambda x: b(jnp.sin(a(x)) * 2.0)).dataflow(ONES)
    assert [line.split()[0] for line in str(flow).splitlines()[1:-1]].count(
        b.slice.name
    ) == 3


def test_a_donated_future_is_not_used_again(pw):
    take = pw.fn(lambda x: x + 1, pw.slice(1), donate=(0,))
    first = take(ONES)
    assert values(take(first)) == [3.0, 3.0]
    with pytest.raises(ArgumentError, match="after it was donated"):
        first.result()


def test_what_was_sent_arrives_though_it_was_donated_meanwhile(here):
    gate = threading.Event()

    def wait(x):
        gate.wait(60)
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype)
    source, target = here.slice(2, island="island0"), here.slice(2, island="island1")
    count = here.fn(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), source, donate=(0,)
    )
    hold = here.fn(lambda x: jax.pure_callback(wait, shape, x), target)
    state, held = count({"a": ONES, "b": ONES}), hold(ONES)
    sent_first = here.put(state, target)
    for _ in range(MOST_ON_CPU):  # the island takes no more before the first is done
        held = hold(held)
    sent = here.put(state, target)
    for _ in range(3):
        state = count(state)
    assert values(state) == {"a": [5.0, 5.0], "b": [5.0, 5.0]}
    gate.set()
    for each in (sent_first, sent):
        assert values(each) == {"a": [2.0, 2.0], "b": [2.0, 2.0]}


def test_ops_may_be_made_in_the_function_that_calls_them(here):
    on, to = here.slice(2, island="island0"), here.slice(2, island="island1")

    @here.program
    def f(x):
        return here.fn(lambda x: x + 1, to)(here.fn(lambda x: x * 2, on)(x))

    assert values(f(ONES)) == [3.0, 3.0]
    gc.collect()
    assert "lambda" in str(f.dataflow(ONES))
    assert values(f(ONES)) == [3.0, 3.0]


def test_random_keys_go_from_slice_to_slice(pw):
    split = pw.fn(lambda key: jax.random.split(key, 2), pw.slice(2))
    draw = pw.fn(lambda keys: jax.random.uniform(keys[1]), pw.slice(1))
    key = jax.random.key(3)
    drawn = pw.program(lambda key: draw(split(key)))(key)
    assert float(drawn) == float(jax.random.uniform(jax.random.split(key, 2)[1]))


def test_results_that_are_equal_are_one_future(pw, ops):
    a, _, _ = ops
    given = a(ONES)
    one, two, same = pw.program(lambda x: (y := a(x), y, x))(given)
    assert one is two
    assert same is given


def test_calls_of_several_threads_are_in_one_order(pw, ops):
    found = []

    def run():
        found.append(values([traced(pw, ops)(ONES) for _ in range(5)]))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[([3.0, 3.0], [2.0, 2.0])] * 5] * 3


def test_shard_map_runs_on_the_mesh_of_its_slice(pw):
    on = pw.slice(2)
    body = jax.shard_map(
        lambda x: jax.lax.psum(x, "devices"),
        mesh=on.mesh,
        in_specs=P("devices"),
        out_specs=P(),
    )
    assert values(pw.fn(body, on)(np.array([1.0, 2.0]))) == [3.0]


def test_numbers_of_python_take_the_dtype_of_what_they_meet(pw):
    scale = pw.fn(lambda x, by: x * by, pw.slice(1))
    one = pw.fn(lambda: jnp.multiply(1.0, 2.0), pw.slice(1))
    x = np.ones(2, jnp.bfloat16)
    alone = scale(x, 2.0)
    assert alone.dtype == pw.program(lambda x: scale(x, 2.0))(x).dtype == jnp.bfloat16
    assert scale(x, one()).dtype == jnp.bfloat16


def test_a_spec_that_names_no_axis_is_kept(here):
    on = here.slice(2)
    cut = here.put(ONES, on, P("devices"))
    assert (
        here.fn(lambda x: x * 2, on, out_specs=P())(cut).result().sharding.spec == P()
    )


def test_a_future_iterates_formats_and_copies_as_an_array_does(pw, ops):
    future = ops[0](ONES)
    assert [f"{part:.1f}" for part in future] == ["2.0", "2.0"]
    assert f"{ops[0](ONES[0]):.3f}" == "2.000"
    np.array(future)[0] = 3


def test_an_array_that_was_given_is_not_donated(pw):
    double = pw.fn(lambda x: x * 2, on := pw.slice(1))
    given = double(np.ones(1000, np.float32)).result()
    pw.fn(lambda x: x + 1, on, donate=(0,))(given).result()
    assert not given.is_deleted()


def test_an_array_that_was_deleted_fails_its_op_and_no_other(here):
    a, b, _ = figure_2(here, 2)
    lost = a(ONES)
    lost.result().delete()
    with pytest.raises(OpFailedError, match="op `send` on island0 failed"):
        b(lost).result(60)
    assert values(b(ONES)) == [2.0, 2.0]


def test_ctrl_c_in_a_call_leaves_no_island_waiting(pw, ops, monkeypatch):
    a, b, _ = ops
    flow = pw.program(lambda x: b(a(x)))

    def interrupted(run, called):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pw._submissions._scheduler, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            flow(ONES)
    assert values(flow(ONES)) == [3.0, 3.0]


def test_what_another_thread_donated_after_a_look_is_refused(pw, ops):
    take = pw.fn(lambda x: x + 1, ops[0].slice, donate=(0,))
    given = ops[0](ONES)
    flow = pw.program(ops[0]).dataflow(given)
    leaves, _ = pw.look((given,))
    take(given)
    with pytest.raises(ArgumentError, match="after it was donated"):
        flow.run(leaves)


def test_a_copy_of_a_future_is_the_future_and_a_pickle_an_array(pw, ops):
    future = ops[0](ONES)
    for copied in (copy.copy(future), copy.deepcopy({"x": future})["x"]):
        assert copied is future
    del copied
    gc.collect()
    array = pickle.loads(pickle.dumps(future))
    assert isinstance(array, jax.Array)
    assert values(ops[1](future)) == [3.0, 3.0]
    assert array.tolist() == [2.0, 2.0]


def test_a_gradient_of_what_is_not_used_is_zero(pw, ops):
    def loss(params, x):
        return ops[0](params["used"] * x).sum()

    params = {"used": ONES, "unused": np.float32(3)}
    found = pw.program(jax.grad(loss))(params, ONES)
    assert values(found) == {"used": [2.0, 2.0], "unused": 0.0}


def test_an_error_outside_of_a_program_names_the_line_of_the_function(here):
    def fails(x):
        raise ValueError("no more data")

    def calls(x):
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((2,), jnp.float32), x)

    with pytest.raises(OpFailedError, match=r"no more data") as error:
        here.fn(calls, here.slice(1))(ONES).result(60)
    line = calls.__code__.co_firstlineno
    assert f"test_controller.py:{line} in calls" in str(error.value)


def test_a_result_that_is_late_says_how_long_it_had(here):
    gate = threading.Event()

    def wait(x):
        gate.wait(60)
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    held = here.fn(lambda x: jax.pure_callback(wait, shape, x), here.slice(1))(ONES)
    with pytest.raises(TimeoutError, match=r"`timeout_s` must be .*, got 0\.01"):
        held.result(0.01)
    gate.set()
    assert values(held) == [1.0, 1.0]


def test_a_position_alone_may_be_donated(pw):
    take = pw.fn(lambda x: x + 1, pw.slice(1), donate=0)
    first = take(ONES)
    assert values(take(first)) == [3.0, 3.0]
    with pytest.raises(ArgumentError, match="after it was donated"):
        first.result()
