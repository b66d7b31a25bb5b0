"""The form of the data: taken apart into leaves, checked, described, and put together.

Here, from below:

    tensors             what is a tensor or can become one; its dtype and its bytes
    labels, objects     keys as names and JSON; text and objects in place of numbers
    containers          taken apart and made; their trees are in `record_format.grammar`
    nodes, structure    the form of a buffer's columns, which is JSON in its schema
    mismatch, leaves    batches against the form of the columns
    deferred, batches   items as a batch, made at the first look or now; and back
    packing             an item as a tree, bytes and JSON
"""
