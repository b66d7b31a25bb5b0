"""Samplers that draw items by priority, and the tables and trees that store priorities."""
