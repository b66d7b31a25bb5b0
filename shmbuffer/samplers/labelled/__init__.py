"""Samplers that choose items by a label: the policy version or the group of each item.

item_entries        ──▶ index                   ──▶ the sampler, or `source` for a consumer
reads the label         adds items written          chooses labels, and items
of each item            since the last update       with each label
"""
