import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from replicator import strategies, wrap_optimizer
from replicator.errors import ArgumentError
from replicator.nnx import params_of
from replicator.strategies import Rule, Rules, Strategy
from replicator.strategies.table import rows

SHAPES = {"dense": {"kernel": (256, 64), "bias": (64,)}, "odd": (7, 999)}
is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}


def made(optimizer):
    def init_fn(key):
        params = jax.tree.map(jnp.zeros, SHAPES, **is_shape)
        return {"params": params, "opt": optimizer.init(params), "n": 0}

    return strategies.variables_made_by(init_fn)


VARIABLES = made(optax.adam(0.1))
BUILT = {
    "data_parallel": strategies.data_parallel(),
    "zero1": strategies.zero1(),
    "zero2": strategies.zero2(replicas=2),
    "fsdp": strategies.fsdp(whole_below_bytes=0),
    "hybrid": strategies.hybrid(shard=4),
    "tensor_parallel": strategies.tensor_parallel({"*/kernel": (None, "model")}),
    "rules": Rules([Rule(pattern="*", stored="shard", uneven="whole")], shard=8),
    "padded": strategies.fsdp(uneven="pad", whole_below_bytes=0),
}


@pytest.fixture(params=BUILT)
def strategy(request):
    return BUILT[request.param]


def stored(strategy, path, variables=VARIABLES):
    [variable] = [each for each in variables if each.path == path]
    return strategy.place(variable, strategy.sizes(8)).stored


def test_json_and_yaml_give_back_what_was_written(strategy):
    assert strategies.from_json(strategies.to_json(strategy)) == strategy
    assert strategies.from_yaml(strategies.to_yaml(strategy)) == strategy


def test_moments_follow_their_parameter_under_any_optimizer():
    for optimizer in (optax.adam(0.1), wrap_optimizer(optax.chain(optax.adam(0.1)))):
        follows = {each.path: each.follows for each in made(optimizer)}
        [moment] = [path for path in follows if path.endswith("mu/dense/kernel")]
        assert follows[moment] == "params/dense/kernel"
        assert follows["n"] == "n"


def test_moments_of_two_models_follow_their_own():
    def half():
        return {
            "params": jnp.zeros((8, 8)),
            "opt": optax.adam(1.0).init(jnp.zeros((8, 8))),
        }

    found = strategies.variables_of({"critic": half(), "generator": half()})
    follows = {each.path: each.follows for each in found}
    assert follows["critic/opt/0/mu"] == "critic/params"
    assert follows["generator/opt/0/nu"] == "generator/params"


def test_moments_of_a_module_follow_its_parameters():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def init_fn(key):
        model = Pair(nnx.Rngs(key))
        return {"model": model, "opt": optax.trace(0.9).init(params_of(model))}

    found = strategies.variables_made_by(init_fn)
    follows = {each.path: each.follows for each in found}
    assert follows["opt/trace/up/kernel"] == "model/up/kernel"
    assert follows["opt/trace/down/kernel"] == "model/down/kernel"


SQUARE = {"w": jnp.zeros((8, 8))}
MOMENTS = optax.trace(0.9).init(SQUARE)
FOLLOWS = {
    "a copy beside the parameters": (
        {"params": SQUARE, "ema": SQUARE, "opt": MOMENTS},
        {"opt/trace/w": "params/w"},
    ),
    "a copy beside a module": (
        {"train": {"model": SQUARE, "ema": SQUARE, "opt": MOMENTS}},
        {"train/opt/trace/w": "train/model/w"},
    ),
    "a copy that has params, too": (
        {"params": SQUARE, "ema": {"params": SQUARE}, "opt": MOMENTS},
        {"opt/trace/w": "params/w"},
    ),
    "optimizers named after their parameters": (
        {"gen": SQUARE, "disc": SQUARE, "opt_gen": MOMENTS, "opt_disc": MOMENTS},
        {"opt_gen/trace/w": "gen/w", "opt_disc/trace/w": "disc/w"},
    ),
    "optimizers in one dict": (
        {"params": {"gen": SQUARE, "disc": SQUARE}, "opt": {"gen": MOMENTS}},
        {"opt/gen/trace/w": "params/gen/w"},
    ),
}


@pytest.mark.parametrize("which", FOLLOWS)
def test_of_parameters_that_are_alike_moments_follow_the_one_of_their_name(which):
    state, expected = FOLLOWS[which]
    found = strategies.variables_of(state)
    assert {v.path: v.follows for v in found if v.is_optimizer} == expected


NAMED = [
    ("params/optical/w", False),
    ("optics/w", False),
    ("params/opt/w", False),
    ("optimizer/model/w", False),
    ("optimizer/momentum/model/w", True),
    ("opt_state/w", True),
    ("opt_gen/w", True),
]


@pytest.mark.parametrize(("path", "is_optimizer"), NAMED)
def test_an_optimizer_is_known_by_its_name_at_the_top_alone(path, is_optimizer):
    state = jnp.zeros((8, 8))
    for part in reversed(path.split("/")):
        state = {part: state}
    [found] = strategies.variables_of(state)
    assert (found.path, found.is_optimizer) == (path, is_optimizer)


def test_a_module_that_its_optimizer_holds_is_no_optimizer():
    def init_fn(key):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(key))
        tx = optax.trace(0.9)
        return {"optimizer": nnx.ModelAndOptimizer(model, tx, wrt=nnx.Param)}

    found = {each.path: each for each in strategies.variables_made_by(init_fn)}
    moment = found["optimizer/opt_state/trace/kernel"]
    assert not found["optimizer/model/kernel"].is_optimizer
    assert (moment.is_optimizer, moment.follows) == (True, "optimizer/model/kernel")


def test_the_largest_dimension_that_divides_is_cut():
    assert stored(strategies.fsdp(), "params/dense/kernel") == ("shard", None)


def test_small_variables_and_those_that_do_not_divide_stay_whole():
    assert stored(strategies.fsdp(), "params/dense/bias") == (None,)
    assert stored(strategies.fsdp(), "params/odd") == (None, None)


def test_where_none_divides_the_largest_dimension_is_padded():
    padded = BUILT["padded"]
    assert stored(padded, "params/odd") == (None, "shard")
    assert stored(padded, "opt/0/mu/odd") == (None, "shard")
    assert stored(padded, "params/dense/kernel") == ("shard", None)
    assert stored(padded, "n") == ()


def test_a_dimension_that_is_named_is_padded():
    rules = {"params/odd": ("model",)}
    padded = strategies.tensor_parallel(rules, model=8, uneven="pad")
    assert stored(padded, "params/odd") == ("model", None)


def test_what_an_optimizer_keeps_in_another_shape_is_not_padded():
    factored = made(optax.scale_by_factored_rms(min_dim_size_to_factor=4))
    [row] = [each for each in factored if each.path == "opt/v_row/odd"]
    assert row.shape == (7,)
    assert stored(BUILT["padded"], row.path, factored) == (None,)


def test_a_row_counts_padding_on_devices_and_on_the_wire():
    found = {row.path: row for row in rows(BUILT["padded"], VARIABLES, 8)}
    odd = found["params/odd"]
    assert odd.nbytes == 7 * 999 * 4
    assert odd.device_bytes == 7 * 1000 * 4 // 8
    assert odd.wire_bytes == 3 * 7 * 1000 * 4 * 7 // 8
    [zero1] = [
        row
        for row in rows(strategies.zero1(uneven="pad"), VARIABLES, 8)
        if row.path == "params/odd"
    ]
    assert zero1.device_bytes == odd.nbytes


def test_zero1_cuts_the_state_of_the_optimizer_alone():
    zero1 = strategies.zero1()

    assert stored(zero1, "params/dense/kernel") == (None, None)
    assert stored(zero1, "opt/0/mu/dense/kernel") == ("shard", None)


def test_the_first_rule_that_matches_decides():
    kept = Rules(
        [Rule(pattern="*/kernel"), Rule(pattern="*", stored=("shard",))], shard=8
    )
    assert stored(kept, "params/dense/kernel") == (None, None)
    assert stored(kept, "params/dense/bias") == ("shard",)


@pytest.mark.parametrize(
    ("strategy", "times"),
    [(strategies.zero1(), 3), (strategies.zero2(), 2), (strategies.fsdp(), 3)],
)
def test_a_row_says_how_often_a_variable_is_sent(strategy, times):
    [row] = [
        row for row in rows(strategy, VARIABLES, 8) if row.path == "params/dense/kernel"
    ]
    assert row.wire_bytes == times * 256 * 64 * 4 * 7 // 8


def test_a_row_says_what_a_variable_takes_on_a_device_and_on_the_wire():
    found = {row.path: row for row in rows(strategies.fsdp(), VARIABLES, 8)}
    kernel = found["params/dense/kernel"]

    assert kernel.device_bytes == 256 * 64 * 4 // 8
    # Gathered twice, scattered once: 7/8 of it each.
    assert kernel.wire_bytes == 3 * 256 * 64 * 4 * 7 // 8
    assert found["params/dense/bias"].wire_bytes == 2 * 256 * 7 // 8


def test_a_table_has_a_line_for_each_variable(strategy):
    lines = strategies.table(strategy, VARIABLES, 8).splitlines()

    assert len(lines) == len(VARIABLES) + 2
    assert any("params/dense/kernel" in line for line in lines)


def test_a_difference_names_what_changed():
    changed = strategies.fsdp().diff(strategies.fsdp(whole_below_bytes=0))

    assert changed.splitlines() == [
        '-"whole_below_bytes": 16384,',
        '+"whole_below_bytes": 0,',
    ]
    assert not strategies.fsdp().diff(strategies.fsdp())


BY_HOSTS = [Rule(pattern="*", synchronise="hierarchical")]
BAD = {
    "name: a\nrules:\n- pattern: '*'\n  stord: shard\n": "'stord' in line 4",
    "name: a\nshards: 8\n": "'shards' in line 2",
    "shard: 8\n": "must hold the key 'name'",
    "- 1\n": "something else in line 1",
    "name: [\n": "must be YAML",
    "name: a\nshard: 8\nshard: 4\n": "'shard' again, first in line 2",
    "name: a\nrules: shard\n": "a list of rules, got something else in line 2",
    "name: 3\n": "`name` must be a string",
    "name: a\nwhole_below_bytes: 16k\n": "`whole_below_bytes` must be a whole number",
    "name: a\nrules: [{pattern: '*', stored: 3}]\n": "`stored` must be a partition",
    "name: a\nrules: [{pattern: '*', stored: }]\n": "`stored` must be a partition",
    "name: a\nvariables: x\n": "`variables` must be a list of strings, got 'x'",
    "name: a\nbatch_axes: shard\n": "`batch_axes` must be a list of strings, got 's",
    "name: a\nrules: [{pattern: 3}]\n": "`pattern` must be a string",
    "name: a\nrules: [{pattern: '*', stored: sharp}]\n": "`stored` must be one of",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_text_is_refused_with_its_line(text):
    with pytest.raises(ArgumentError, match=BAD[text]):
        strategies.from_yaml(text)


def test_a_field_that_breaks_its_rule_is_told_with_its_line():
    text = "name: a\nrules:\n- pattern: x\n- pattern: y\n  stored: sharp\n"
    with pytest.raises(ArgumentError) as found:
        strategies.from_yaml(text)
    assert found.value.__notes__ == ["That is in the rule of line 4."]


RULES = {
    "a word": (lambda: Rules("shard"), "`rules` must be a list of rules, got 'shard'"),
    "no partition between steps": (
        lambda: Rule(pattern="*", stored=None),
        "`stored` must be a partition, got None",
    ),
    "no partition where it is multiplied": (
        lambda: Rule(pattern="*", computed=None),
        "`computed` must be a partition, got None",
    ),
    "a list of words": (
        lambda: Strategy(name="a", rules=("x",)),
        r"`rules` must be a list of rules, got \('x',\)",
    ),
    "one that is in no list": (
        lambda: Strategy(name="a", rules=Rule(pattern="*")),
        r"`rules` must be a list of rules, got Rule\(",
    ),
    "two replicas, where each device has one": (
        lambda: Strategy(name="a", kind="replicates", replica=2),
        "must have replica=None .* where it replicates, got replica=2, ",
    ),
    "one replica, where each device has one": (
        lambda: Strategy(name="a", kind="replicates"),
        "must have replica=None .* where it replicates, got replica=1, ",
    ),
    "rules where each device has all": (
        lambda: strategies.data_parallel([Rule(pattern="*", stored="shard")]),
        r"`rules` must leave variables whole where a strategy replicates, .* '\*'",
    ),
    "rules for sums where XLA adds up": (
        lambda: strategies.Rules([Rule(pattern="*", compress="int8")], shard=None),
        r"`rules` must leave `synchronise` .* partitions, got '\*' with 'int8'",
    ),
    "rules for hosts without their size": (
        lambda: strategies.data_parallel(BY_HOSTS).sizes(8),
        "`devices_per_host` must be the number of devices of a host, got data_parallel",
    ),
    "pieces on each host without its size": (
        lambda: strategies.hybrid().sizes(8),
        "`shard` must be the number of devices of a host, got hybrid without it",
    ),
    "a size of hosts without rules for them": (
        lambda: strategies.data_parallel(devices_per_host=4),
        "`devices_per_host` must be left out where no rule .* by hosts, got 4",
    ),
    "an axis as large as a host that is not for pieces": (
        lambda: Strategy(name="a", model="host"),
        "`model` must be a whole number, got 'host'",
    ),
    "an unknown way of a sum": (
        lambda: Rule(pattern="*", synchronise="ring"),
        "`synchronise` must be one of 'all_reduce', 'hierarchical', 'rows', got 'ring'",
    ),
    "an unknown form of numbers": (
        lambda: Rule(pattern="*", compress="int4"),
        r"`compress` must be None, 'bf16', 'f16', 'int8' or 'power_sgd\(rank\)', got",
    ),
    "an axis twice": (
        lambda: Rule(pattern="*", stored=("model", "model")),
        "`stored` must name each mesh axis once",
    ),
    "a list of patterns": (
        lambda: strategies.tensor_parallel(["*/kernel"]),
        "`rules` must map patterns to partitions",
    ),
    "too many dimensions": (
        lambda: stored(
            strategies.tensor_parallel({"*/bias": (None, "model")}),
            "params/dense/bias",
        ),
        "`params/dense/bias` must have as many dimensions as its partition",
    ),
}


@pytest.mark.parametrize("which", RULES)
def test_rules_that_are_none_are_refused(which):
    make, message = RULES[which]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_lists_become_tuples():
    rules = [Rule(pattern="*")]
    found = Strategy(name="a", rules=rules, batch_axes=["shard"], variables=["w f32[]"])
    assert found.batch_axes == ("shard",)
    assert found.rules == tuple(rules)
    assert hash(found)


def test_a_partition_may_be_a_spec_of_jax():
    spec = jax.sharding.PartitionSpec(None, "model")
    assert Rule(pattern="*", stored=spec).stored == (None, "model")


def test_more_shards_than_devices_are_refused():
    with pytest.raises(ArgumentError, match=r"must fit 8 devices, got fsdp with .*16"):
        strategies.fsdp(shards=16).sizes(8)


def test_a_rule_that_matches_nothing_is_refused():
    kept = strategies.tensor_parallel({"*/kernels": ("model",)})
    with pytest.raises(ArgumentError, match=r"got '\*/kernels', which matches none of"):
        kept.check_variables(VARIABLES)


def test_a_partition_that_does_not_divide_and_may_not_stay_whole_is_refused():
    kept = strategies.tensor_parallel({"*/odd": ("model",)})
    with pytest.raises(ArgumentError, match="`params/odd` must divide over"):
        stored(kept, "params/odd")


def test_a_strategy_saved_for_other_variables_is_refused():
    kept = strategies.fsdp().made_for(VARIABLES)
    kept.check_variables(VARIABLES)
    with pytest.raises(ArgumentError, match=r"made for others: `n int32.*` is missing"):
        kept.check_variables(tuple(v for v in VARIABLES if v.path != "n"))
