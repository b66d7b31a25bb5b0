"""A buffer over the nodes of a Ray cluster: a ring on each node, sampled as if they were one.

    node 1                     node 2                     node 3
    writers ─▶ ring ◀─ keeper  writers ─▶ ring ◀─ keeper  learner
                         ╰───────── ShardMap ───────╯        │  counts by mass, one message a shard
                                                             ╰─▶ keepers: draw, update, totals

    sharded_buffer  ShardedReplayBuffer: makes the buffer, and ends it
    sharded_client  the handle of all clients: it writes, samples, updates priorities
    members         its view of the shards: which of them answer, and their masses
    member          one of them: its messages, its loss and its return
    shard_batches   a batch: begun with a message to each shard, finished when they answer
    shares          how many items each shard draws, and their weights
    shard_pieces    the pieces of a batch, one from each shard, and how they are joined
    shard           the part in a keeper: it owns a node's buffer, and draws from it
    shard_map       the actor that knows the keepers, and makes one on each node
    shard_metrics   the numbers of all shards for Prometheus
    credits         the items that a learner may draw
    bank            how much may be written to all shards and drawn, computed from their reports
    flow_control    the map's part in it: a loop over the keepers
    quota           a keeper's part: the quota of its ring
    shard_saves     saves of all shards, which load into as many shards or another number

No items pass through the map, and the keepers have all its state.

Flow control: the map gives quotas, the rings and the learners use them.

    FlowControl ──state, rooms───▶ Vault ──▶ the ring's quota, in its control file ◀── writers
         ▲ Bank: inserts and samples that may be granted    reports: written, drawn, waiting ──╯
         ╰──── Credits of a learner: items that it may draw, for 2 s
"""
