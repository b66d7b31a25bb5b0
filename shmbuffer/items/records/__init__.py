"""Records: items of any size, encoded as bytes.

`Encoder` encodes items as records for a ring of bytes, and `Decoder` decodes them.

    items ──forms, columns──▶ Columns ──encoding_plan, planes──▶ pieces ──▶ RecordBatch
    RecordBatch ──table──▶ Columns ──transfer, cutting──▶ leaves ──building──▶ items

The items in this package consist of dicts, lists, tuples, arrays, text and numbers.
``tensors/records`` adds tensors and TensorDicts, and batches of these.
"""
