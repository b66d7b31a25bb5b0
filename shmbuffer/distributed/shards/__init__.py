"""A buffer over the nodes of a Ray cluster, with a ring on each node, sampled as one buffer.

    node 1                     node 2                     node 3
    writers ─▶ ring ◀─ keeper  writers ─▶ ring ◀─ keeper  learner
                         ╰───────── ShardMap ───────╯        │  counts by mass, one message a shard
                                                             ╰─▶ keepers: draw, update, totals

    sharded_buffer  ShardedReplayBuffer: creates and ends the buffer
    sharded_client  the handle of all clients: writes, samples, updates priorities
    members         a client's view of all shards: which of them answer, and their masses
    member          a client's view of one shard: its messages, its loss and its return
    shard_batches   a batch: started with a message to each shard, finished when they answer
    shares          how many items each shard draws, and their weights
    shard_pieces    the pieces of a batch, one from each shard, and how they are joined
    shard           the owner of a node's buffer, in a keeper, which draws for other nodes
    shard_map       the actor that lists the keepers, and creates one on each node
    shard_metrics   the metrics of all shards for Prometheus
    credits         the items that a learner is allowed to draw
    bank            how many items may be written to all shards and drawn from them
    flow_control    flow control in the map: a loop over the keepers
    quota           flow control in a keeper: the quota of its ring
    shard_saves     saves of all shards, which can be loaded into any number of shards

No items pass through the map, and its state can be rebuilt from the keepers.

Flow control: the map grants quotas, and the rings and the learners use them.

    FlowControl ──state, rooms───▶ Vault ──▶ the ring's quota, in its control file ◀── writers
         ▲ Bank: inserts and samples that may be granted    reports: written, drawn, waiting ──╯
         ╰──── Credits of a learner: items that it may draw within 2 s
"""
