"""Consumers, reservations for rollouts, and published weights."""
