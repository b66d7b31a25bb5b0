"""Items of any size as records: their parts, and their bytes.

`TensorEncoder` makes records of items, which the byte ring keeps; `TensorDecoder` makes items of
records.

    items ──forms, columns──▶ Columns ──plan, compression──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items, or a batch
                                └──layers, joining, padding (ragged)──▶ a batch of what differs
"""
