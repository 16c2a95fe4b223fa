"""Mistakes in datasets: what is no dataset, what has ended, what never ends."""

from benchmarks.first_hour.mistake import mistake

DATASETS = (
    mistake(
        "one batch in the place of a dataset",
        "rep.run(step_fn, batch, init_fn=init_fn)",
        "`dataset`",
        "`dict`",
        remedy="Put it in a list",
    ),
    mistake(
        "an array in the place of a dataset",
        "rep.run(step_fn, batch['x'], init_fn=init_fn)",
        "`dataset`",
        "`ndarray`",
        remedy="Put it in a list",
    ),
    mistake(
        "a path in the place of a dataset",
        "rep.run(step_fn, 'data/train', init_fn=init_fn)",
        "`dataset`",
        "`str`",
        remedy="list",
    ),
    mistake(
        "a tuple of arrays in the place of a dataset",
        "rep.run(step_fn, (batch['x'], batch['y']), init_fn=init_fn)",
        "is an array",
        "float32[4,3]",
        remedy="Use one of these",
    ),
    mistake(
        "an empty dataset",
        "rep.run(step_fn, [], init_fn=init_fn)",
        "`dataset`",
        remedy="Look at its source",
    ),
    mistake(
        "a generator that was read before",
        """
batches = (batch for _ in range(3))
print(len(list(batches)), "batches")
rep.run(step_fn, batches, init_fn=init_fn)
""",
        "`dataset`",
        remedy="Look at its source",
        report="skorch-dev/skorch#1011",
        quiet=True,
    ),
    mistake(
        "a generator for two runs",
        """
batches = (batch for _ in range(3))
first = rep.run(step_fn, batches, init_fn=init_fn)
rep.run(step_fn, batches, init_state=first.state)
""",
        "`dataset`",
        remedy="Look at its source",
        report="keras-team/keras#20402",
        quiet=True,
    ),
    mistake(
        "a generator for several epochs",
        """
batches = (batch for _ in range(3))
rep.run(step_fn, batches, init_fn=init_fn, inputs=InputOptions(epochs=2))
""",
        "`epochs`",
        "2",
        remedy="Pass an iterable that starts anew",
        quiet=True,
    ),
    mistake(
        "a generator that ends before the run",
        "rep.run(step_fn, (batch for _ in range(3)), init_fn=init_fn, steps=10)",
        "`dataset`",
        "10",
        remedy="Repeat it",
        report="frankkramer-lab/aucmedi#189",
        quiet=True,
    ),
    mistake(
        "a generator function that was not called",
        """
def batches():
    yield batch
rep.run(step_fn, batches, init_fn=init_fn)
""",
        "`dataset`",
        "`generator`",
        remedy="Write `def input_fn(context)`",
    ),
    mistake(
        "an input function without return",
        """
def input_fn(context):
    batches = [batch]
rep.run(step_fn, input_fn, init_fn=init_fn)
""",
        "`dataset`",
        "`NoneType`",
        remedy="return",
    ),
    mistake(
        "a cycle that has no end",
        "rep.run(step_fn, itertools.cycle(dataset), init_fn=init_fn)",
        "`dataset`",
        "`itertools.cycle`",
        remedy="Pass `steps`",
    ),
    mistake(
        "the same batch for ever",
        "rep.run(step_fn, itertools.repeat(batch), init_fn=init_fn)",
        "`dataset`",
        "`itertools.repeat`",
        remedy="Pass `steps`",
    ),
    mistake(
        "a dataset of grain that repeats for ever",
        """
data = grain.MapDataset.source(list(range(64))).map(
    lambda n: {"x": batch["x"][n % 32], "y": batch["y"][n % 32]})
rep.run(step_fn, data.repeat().batch(32), init_fn=init_fn)
""",
        "`dataset`",
        "Repeat",
        remedy="Pass `steps`",
    ),
    mistake(
        "a loader of grain that repeats for ever",
        """
sampler = grain.samplers.IndexSampler(32, shuffle=True, seed=0)
loader = grain.DataLoader(data_source=np.arange(32), sampler=sampler,
                          operations=[grain.transforms.Batch(8)])
rep.run(step_fn, loader, init_fn=init_fn)
""",
        "`dataset`",
        "`grain.IndexSampler`",
        remedy="Pass `steps`",
    ),
    mistake(
        "a loader with a sampler that never ends",
        """
class InfiniteSampler:
    def __iter__(self):
        return itertools.count()
class Loader:
    sampler = InfiniteSampler()
    def __iter__(self):
        return (batch for _ in self.sampler)
rep.run(step_fn, Loader(), init_fn=init_fn)
""",
        "`dataset`",
        "InfiniteSampler",
        remedy="Pass `steps`",
    ),
    mistake(
        "an endless dataset behind an input function",
        """
def input_fn(context):
    return itertools.cycle(dataset)
rep.run(step_fn, input_fn, init_fn=init_fn)
""",
        "`dataset`",
        "`itertools.cycle`",
        remedy="Pass `steps`",
    ),
    mistake(
        "an evaluation that never ends",
        """
def endless(context):
    return itertools.cycle(dataset)
params = init_params(jax.random.key(0))
rep.evaluate(eval_fn, endless, state=params)
""",
        "`dataset`",
        "`itertools.cycle`",
        remedy="Pass `steps`",
    ),
    mistake(
        "evaluation data that can be read once",
        """
held_out = iter(dataset)
rep.run(step_fn, dataset, init_fn=init_fn,
        eval_fn=eval_fn, eval_dataset=held_out, eval_every=1)
""",
        "`eval_dataset`",
        remedy="Pass a list",
        quiet=True,
    ),
    mistake(
        "evaluation data that never ends",
        """
data = grain.MapDataset.source([batch]).repeat()
rep.run(step_fn, dataset, init_fn=init_fn,
        eval_fn=eval_fn, eval_dataset=data, eval_every=1)
""",
        "`eval_dataset`",
        "Repeat",
        remedy="Pass `steps`",
    ),
    mistake(
        "an evaluation of nothing",
        "rep.evaluate(eval_fn, [], state=init_params(jax.random.key(0)))",
        "`dataset`",
        remedy="Look at its source",
        quiet=True,
    ),
    mistake(
        "a loader that fails",
        """
def batches():
    yield batch
    raise OSError("train-3.tfrecord: no such file")
rep.run(step_fn, batches(), init_fn=init_fn)
""",
        "train-3.tfrecord",
        "in batches",
        remedy="no such file",
    ),
    mistake(
        "a list of single examples",
        """
examples = [{"x": x, "y": y} for x, y in zip(batch["x"], batch["y"])]
rep.run(step_fn, examples, init_fn=init_fn)
""",
        "`dataset`",
        "`y`",
        remedy="batch axis",
    ),
)
