"""Training on several ranks through MPI: a graph in parts, and optimizer states in shards.

`ParallelGraph`, `ParallelGCN`, `ParallelGraphConvolution` and `sharded` are for users. ``umem run
-n`` starts the ranks.

    ranks.py           wraps MPI for the parts of a graph
    parallel_graph.py  is a rank's parts of a graph
    parallel_gcn.py    has graph convolutions over the parts
    aggregation.py     multiplies by the adjacency, and exchanges rows, one remote part at a time
    part_functions.py  computes a rank's own parts, and exchanges nothing
    part_sums.py       sums over the parts of all ranks, in order
    sharding.py        is `sharded`: it gives the optimizer shards instead of parameters
    shard_layout.py    concatenates parameters into one vector, and splits it between ranks
    shard_exchange.py  exchanges gradients and parameters
    shard_hooks.py     computes hooks' norms over all ranks
    shard_saving.py    saves a rank's range of each array, and reads the ranges that it needs
    shard_refusals.py  refuses optimizers and parameters that cannot be in shards

- Sums are over the parts in order, so that the bits are the same on any number of ranks.
- Decisions that all ranks must make alike are in chainer/agreement.py.
"""
