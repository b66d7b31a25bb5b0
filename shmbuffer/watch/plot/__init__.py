"""The picture of `plot`: a part of the history as charts."""
