"""One buffer over the nodes of a Ray cluster: a ring on each, sampled as if they were one.

    node 1                     node 2                     node 3
    writers ─▶ ring ◀─ keeper  writers ─▶ ring ◀─ keeper  learner
                         ╰───────── ShardMap ───────╯        │  counts by mass, one message a shard
                                                             ╰─▶ keepers: draw, update, totals

    replay_buffer   ShardedReplayBuffer: what only its creator may do
    client          the handle that everybody has; sampling and updates are parts of it
    members         its picture of the shards: who lives, what each weighs
    member          one of them: how it is asked, lost and found again
    batches         a batch: begun with a message to each shard, finished when they answer
    shares          how many items each shard draws, and what they weigh
    pieces          what a shard draws, and how the pieces become a batch
    message         a piece as one run of bytes
    keeper          the actor that owns the buffer of a node, and draws from it
    shard_map       the actor that knows the keepers, and makes one on each node
    metrics         the numbers of all shards for Prometheus
    limited         what a handle may ask of flow control
    credits         the items that a learner may draw
    bank            how much all shards may be written and drawn, as a function of what they say
    flow_control    the map's part in it: a loop over the keepers
    lease           a keeper's part: the lease of its ring
    saving          all shards saved, and loaded into as many or another number

Nobody's data pass through the map. It holds nothing that it cannot ask the keepers for.

Flow control: the map leases, the rings and the learners spend.

    FlowControl ──ledger, rooms──▶ Vault ──▶ the ring's lease, in its control file ◀── writers
         ▲ Bank: inserts and samples that may be leased    reports: written, drawn, waiting ──╯
         ╰──── Credits of a learner: items that it may draw, for 2 s
"""
