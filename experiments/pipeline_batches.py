"""Cut a shuffled dataset into the batches of one input pipeline."""

import grain

from replicator.inputs import InputContext


def pipeline_batches(
    examples: grain.MapDataset,
    context: InputContext,
    *,
    global_batch: int,
    threads: int = 0,
) -> grain.IterDataset:
    """Yield what one pipeline reads of each global batch.

    Batch t of pipeline i is examples [i·b, (i+1)·b) of global batch t, whatever the
    number of pipelines.

    Args:
      examples: All examples, in the order that one pipeline would give.
      context: Which pipeline reads.
      global_batch: Examples per update.
      threads: That read ahead; 0 where examples are in memory, since `replicator`
        reads ahead itself.

    Returns:
      Batches of b = `global_batch / context.num_pipelines` examples.

    Raises:
      ArgumentError: The batch does not divide evenly over pipelines.
    """
    # Whole batches are dealt out in turn, so that pipeline after pipeline, batch after
    # batch, examples come in the order that one pipeline would give.
    batches = examples.batch(context.batch_size(global_batch))
    mine = batches[context.pipeline_index :: context.num_pipelines]
    return mine.to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    )
