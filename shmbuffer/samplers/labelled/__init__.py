"""Index of items by label, which is the policy version or the group of an item.

reading             ──▶ index                     ──▶ a sampler, or for a consumer `source`
one entry of items      items written since           chooses labels, and
                        the last update               items of each label
"""
