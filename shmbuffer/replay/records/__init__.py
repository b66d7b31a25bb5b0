"""Items of any size as records: what they are made of, and their bytes.

`Encoder` makes records of items, which the byte ring keeps; `Decoder` makes items of them again.
"""
