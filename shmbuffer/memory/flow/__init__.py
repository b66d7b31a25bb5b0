"""Implements flow control: the rate limiter, reservations, consumers, and waiting."""
