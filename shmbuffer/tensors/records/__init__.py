"""Records of tensors and TensorDicts. A record stores one item of any size as bytes.

`TensorEncoder` encodes items as records for the byte ring, and `TensorDecoder` decodes them.

    items ──forms, columns──▶ Columns ──plan, compression──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items, or a batch
                                └──layers, joining, padding (ragged)──▶ a batch of ragged items
"""
