"""Items of any size as records: what they are made of, and their bytes.

`Encoder` makes records of items, which the byte ring keeps; `Decoder` makes items of them.

    items ──forms, columns──▶ Columns ──encoding_plan, planes──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items

Here items are made of dicts, lists, tuples, arrays, text and numbers; ``tensors/records`` adds
tensors and TensorDicts, and batches of them.
"""
