"""Who draws: one sampler a file."""

from shmbuffer.replay.samplers.prioritized import PrioritizedSampler
from shmbuffer.replay.samplers.random import RandomSampler
from shmbuffer.replay.samplers.sampler import PriorityUpdate, Sampler

__all__ = ["PrioritizedSampler", "PriorityUpdate", "RandomSampler", "Sampler"]
