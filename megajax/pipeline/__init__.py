"""Pipeline parallelism: executes a schedule (`megajax.schedules`) as one SPMD program over the mesh axes data and pipe.

executor.py is the entry: how ticks run, and the functions that train and evaluate. rank.py is one rank's ticks;
embedding_and_head.py its ends; stage.py the forward and backward of a chunk of blocks, of one kind or of several, and
block_steps.py those of one block; split_backward.py splits a block's backward for zero-bubble schedules; stash.py and
slots.py hold the buffers and assign their slots; loops.py has loops of zero iterations; layout.py and parameters.py say how
parameters are arranged and sharded; pipedream_2bw.py is the pipeline that is never drained; decode.py generates text.
"""
