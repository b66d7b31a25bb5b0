"""Records, which store items of any size as bytes.

`Encoder` encodes items as records for the byte ring, and `Decoder` decodes them.

    items ──forms, columns──▶ Columns ──encoding_plan, planes──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items

These items consist of dicts, lists, tuples, arrays, text and numbers; ``tensors/records`` adds
tensors and TensorDicts, and batches of them.
"""
