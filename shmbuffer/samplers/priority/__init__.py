"""Sampling by priority: where priorities are stored, and how they change."""
