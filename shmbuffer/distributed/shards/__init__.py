"""A buffer that is spread over the nodes of a Ray cluster, and sampled like a single buffer.

    node 1                     node 2                     node 3
    writers ─▶ ring ◀─ keeper  writers ─▶ ring ◀─ keeper  learner
                         ╰───────── ShardMap ───────╯        │  counts by mass, a message per shard
                                                             ╰─▶ keepers: draw, update, totals

    sharded_buffer  ShardedReplayBuffer: creates and ends the buffer
    sharded_client  the handle of each client: writes, samples, updates priorities
    members         a client's view of all shards: which of them answer, and their masses
    member          a client's view of one shard: its messages, its loss and its return
    updates         priority updates for items in several shards
    shard_batches   a batch: begun with a message to each shard, finished when the shards answer
    shares          the number of items that each shard draws, and the importance weights
    shard_pieces    the pieces of a batch, one from each shard, and how they are joined
    shard           the owner of a node's buffer, in a keeper; it draws for other nodes
    shard_map       the actor that lists the keepers, and creates a keeper on each node
    shard_metrics   the metrics of all shards for Prometheus
    credits         the items that a learner can draw
    bank            computes how many items can be written to and drawn from all shards
    flow_control    flow control in the map: a loop over the keepers
    quota           flow control in a keeper: the quota of its ring
    shard_saves     saves of all shards, which can be loaded into any number of shards

No items pass through the map, and the map's state can be rebuilt from the keepers.

In flow control, the map grants quotas to the rings and to the learners:

    FlowControl ──state, quotas──▶ Vault ──▶ the ring's quota, in its control file ◀── writers
         ▲ Bank: inserts and samples that can be granted    reports: written, drawn, waiting ──╯
         ╰──── Credits of a learner: items that the learner can draw within 2 s
"""
