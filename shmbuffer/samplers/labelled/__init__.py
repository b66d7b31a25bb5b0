"""Index of items by label, which is the policy version or the group of an item.

reading             ──▶ index                     ──▶ a sampler, or for a consumer `source`
one entry of items      what was written, since       which labels, and which of
                        the last look                 their items
"""
