"""Items of any size as records: what they are made of, and their bytes.

`TensorEncoder` makes records of items, which the byte ring keeps; `TensorDecoder` makes items of them again.

    items ──forms, columns──▶ Columns ──plan, sharing, compression──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items, or a batch
                                └──layers, joining, padding (ragged)──▶ a batch of what differs
"""
