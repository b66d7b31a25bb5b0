"""Samplers, which draw the items: one a file."""

from shmbuffer.numpy.raw_priorities import PriorityUpdate
from shmbuffer.replay.samplers.consuming import ConsumingSampler
from shmbuffer.replay.samplers.groups import GroupCounts, PromptGroupSampler
from shmbuffer.replay.samplers.prioritized import PrioritizedSampler
from shmbuffer.replay.samplers.prioritized_slices import PrioritizedSliceSampler
from shmbuffer.replay.samplers.random import RandomSampler
from shmbuffer.replay.samplers.sampler import Sampler
from shmbuffer.replay.samplers.segment_trees import (
    MinSegmentTreeFp32,
    MinSegmentTreeFp64,
    SumSegmentTreeFp32,
    SumSegmentTreeFp64,
)
from shmbuffer.replay.samplers.slices import SliceSampler
from shmbuffer.replay.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from shmbuffer.replay.samplers.staleness import StalenessAwareSampler
from shmbuffer.replay.samplers.streaming_slices import StreamingSliceSampler
from shmbuffer.replay.samplers.without_replacement import SamplerWithoutReplacement

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
