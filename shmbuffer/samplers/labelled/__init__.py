"""Items by label: the version that made them, or the group that they are of.

reading             ──▶ index                     ──▶ a sampler, or for a consumer `source`
one entry of items      what was written, since       which labels, and which of
                        the last look                 their items
"""
