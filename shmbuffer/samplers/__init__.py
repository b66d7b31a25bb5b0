"""Samplers, which choose the items of a batch, one per module."""

from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.samplers.consuming import ConsumingSampler
from shmbuffer.samplers.groups import GroupCounts, PromptGroupSampler
from shmbuffer.samplers.prioritized import PrioritizedSampler
from shmbuffer.samplers.prioritized_slices import PrioritizedSliceSampler
from shmbuffer.samplers.random import RandomSampler
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.samplers.segment_trees import (
    MinSegmentTreeFp32,
    MinSegmentTreeFp64,
    SumSegmentTreeFp32,
    SumSegmentTreeFp64,
)
from shmbuffer.samplers.slices import SliceSampler
from shmbuffer.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from shmbuffer.samplers.staleness import StalenessAwareSampler
from shmbuffer.samplers.streaming_slices import StreamingSliceSampler
from shmbuffer.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "GroupCounts",
    "MinSegmentTreeFp32",
    "MinSegmentTreeFp64",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PriorityUpdate",
    "PromptGroupSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StreamingSliceSampler",
    "SumSegmentTreeFp32",
    "SumSegmentTreeFp64",
]
