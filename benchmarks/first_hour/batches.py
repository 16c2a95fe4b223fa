"""Mistakes in batches: their lengths, their types, what differs from batch to batch."""

from benchmarks.first_hour.mistake import mistake

BATCHES = (
    mistake(
        "a batch that does not divide",
        """
odd = {"x": batch["x"][:12], "y": batch["y"][:12]}
rep.run(step_fn, [odd], init_fn=init_fn)
""",
        "`global_batch`",
        "12",
        remedy="Use 8 or 16",
        report="jax-ml/jax#3638",
    ),
    mistake(
        "a batch that does not divide, in a loop of one's own",
        """
odd = {"x": batch["x"][:12], "y": batch["y"][:12]}
rep.compile(step_fn)(rep.init(init_fn), odd)
""",
        "`global_batch`",
        "12",
        remedy="Use 8 or 16",
        report="google/objax#52",
    ),
    mistake(
        "a batch that microbatches do not divide",
        "rep.run(step_fn, dataset, init_fn=init_fn, accumulate=3)",
        "`global_batch`",
        "3 microbatches",
        remedy="Use 24 or 48",
    ),
    mistake(
        "leaves of two lengths",
        """
bad = {"x": batch["x"], "y": batch["y"][:16]}
rep.run(step_fn, [bad], init_fn=init_fn)
""",
        "`x` with 32",
        "`y` with 16",
        remedy="Give each leaf one row per example",
        report="jax-ml/jax#1382",
    ),
    mistake(
        "leaves of two lengths, in a loop of one's own",
        """
bad = {"x": batch["x"], "y": batch["y"][:16]}
rep.compile(step_fn)(rep.init(init_fn), bad)
""",
        "`x`",
        "`y`",
        remedy="Give each leaf one row per example",
        report="google/flax#2431",
    ),
    mistake(
        "a number in a batch",
        "rep.run(step_fn, [batch | {'rate': 0.1}], init_fn=init_fn)",
        "`rate`",
        remedy="Repeat it for each example",
        report="jax-ml/jax#5201",
    ),
    mistake(
        "text in a batch",
        "rep.run(step_fn, [batch | {'text': ['a'] * 32}], init_fn=init_fn)",
        "`text",
        "`str`",
        remedy="leave it out",
    ),
    mistake(
        "an array of text",
        "rep.run(step_fn, [batch | {'text': np.array(['a'] * 32)}], init_fn=init_fn)",
        "`text`",
        remedy="leave it out",
    ),
    mistake(
        "an array of arrays",
        """
rows = np.empty(32, object)
rows[:] = [np.zeros(1 + n % 3) for n in range(32)]
rep.run(step_fn, [batch | {"tokens": rows}], init_fn=init_fn)
""",
        "`tokens`",
        "object",
        remedy="Encode it",
    ),
    mistake(
        "sentences of different lengths",
        """
tokens = [[1, 2, 3], [4, 5]] * 16
rep.run(step_fn, [batch | {"tokens": tokens}], init_fn=init_fn)
""",
        "`tokens`",
        "2 and 3",
        remedy="Pad them",
    ),
    mistake(
        "sentences of different lengths, in a loop of one's own",
        """
tokens = [[1, 2, 3], [4, 5]] * 16
rep.compile(step_fn)(rep.init(init_fn), batch | {"tokens": tokens})
""",
        "`tokens`",
        "2 and 3",
        remedy="Pad them",
    ),
    mistake(
        "a label that is missing",
        """
labels = [0.0, None] * 16
rep.run(step_fn, [batch | {"y": labels}], init_fn=init_fn)
""",
        "`y`",
        "None",
        remedy="Pad them",
    ),
    mistake(
        "lists in the place of arrays",
        """
lists = {name: leaf.tolist() for name, leaf in batch.items()}
print(np.round(rep.run(step_fn, [lists], init_fn=init_fn).metrics["loss"], 4))
""",
        right="""
result = rep.run(step_fn, [batch], init_fn=init_fn)
print(np.round(result.metrics["loss"], 4))
""",
        quiet=True,
    ),
    mistake(
        "lists in an evaluation",
        """
lists = {name: leaf.tolist() for name, leaf in batch.items()}
params = init_params(jax.random.key(0))
print(np.round(rep.evaluate(eval_fn, [lists], state=params)["loss"], 4))
""",
        right="""
params = init_params(jax.random.key(0))
print(np.round(rep.evaluate(eval_fn, [batch], state=params)["loss"], 4))
""",
        quiet=True,
    ),
    mistake(
        "a second batch of another width",
        """
other = batch | {"x": np.zeros((32, 4), np.float32)}
rep.run(step_fn, [batch, other], init_fn=init_fn)
""",
        "`x`",
        "batch 1",
        remedy="Cast, crop or pad it",
    ),
    mistake(
        "a second batch of another type",
        """
other = batch | {"y": np.zeros(32, np.int32)}
rep.run(step_fn, [batch, other], init_fn=init_fn)
""",
        "`y`",
        "int32",
        remedy="Cast, crop or pad it",
    ),
    mistake(
        "a second batch without its labels",
        "rep.run(step_fn, [batch, {'x': batch['x']}], init_fn=init_fn)",
        "no `y`",
        "batch 1",
        remedy="Make all batches alike",
    ),
    mistake(
        "a short batch among others",
        """
short = {"x": batch["x"][:8], "y": batch["y"][:8]}
rep.run(step_fn, [batch, short, batch], init_fn=init_fn)
""",
        "`dataset`",
        "batch 1",
        remedy="Make the batches of the input equal",
    ),
    mistake(
        "a last batch that is short",
        """
short = {"x": batch["x"][:10], "y": batch["y"][:10]}
rep.run(step_fn, [batch, short], init_fn=init_fn)
""",
        '`batch["mask"]`',
        "batch 1",
        remedy="Weight the loss by it",
        quiet=True,
    ),
    mistake(
        "NaN in the data",
        """
x = batch["x"].copy()
x[5, 1] = np.nan
rep.run(step_fn, [batch | {"x": x}], init_fn=init_fn)
""",
        "`x`",
        "example 5",
        remedy="Clean that example",
        quiet=True,
    ),
    mistake(
        "ids beyond 32 bits",
        "rep.run(step_fn, [batch | {'id': np.arange(32) + 2**40}], init_fn=init_fn)",
        "`id`",
        "int32",
        remedy="`jax_enable_x64`",
        report="keras-team/keras#21115",
        quiet=True,
    ),
    mistake(
        "ids beyond 32 bits, in a loop of one's own",
        """
state, step = rep.init(init_fn), rep.compile(step_fn)
step(state, batch | {"id": np.arange(32) + 2**40})
""",
        "`id`",
        "int32",
        remedy="`jax_enable_x64`",
        report="jax-ml/jax#23829",
        quiet=True,
    ),
    mistake(
        "dates in a batch",
        """
days = np.datetime64("2026-01-01") + np.arange(32)
rep.run(step_fn, [batch | {"day": days}], init_fn=init_fn)
""",
        "`day`",
        remedy="Encode it",
    ),
    mistake(
        "numbers of another machine",
        "rep.run(step_fn, [batch | {'y': batch['y'].astype('>f4')}], init_fn=init_fn)",
        "`y`",
        "byte order",
        remedy="Convert it",
    ),
    mistake(
        "a batch with the device axis of pmap",
        """
rows = {name: leaf.reshape(8, 4, *leaf.shape[1:]) for name, leaf in batch.items()}
print(np.round(rep.run(step_fn, [rows], init_fn=init_fn).metrics["loss"], 4))
""",
        right="""
result = rep.run(step_fn, [batch], init_fn=init_fn)
print(np.round(result.metrics["loss"], 4))
""",
        quiet=True,
    ),
    mistake(
        "parameters with the device axis of pmap",
        """
def init_fn(key):
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), init_params(key))
    return {"params": params, "opt": optimizer.init(params)}
rep.run(step_fn, dataset, init_fn=init_fn)
""",
        "loss_fn",
        '@ params["w"]',
        remedy="to have the same shape",
        report="jax-ml/jax#9933",
    ),
    mistake(
        "a batch in the place of the state",
        "rep.compile(step_fn)(batch, rep.init(init_fn))",
        "`params/w`",
        remedy="Give each leaf one row per example",
    ),
)
