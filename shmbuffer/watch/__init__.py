"""Monitors the current and the past activity of a buffer, for users and programs.

    counters ──▶ stats ──▶ loggers, metrics          numbers for a training script and Prometheus
       └──────▶ historian ──▶ memory/history_writer  recorded by the coordinator once per second
    inspect, item_stats, history ──▶ look ──▶ findings, report      problems; one picture
    inspect, inspect, ...    ──▶ pace, events ──▶ panels, screen, live      a live view

The service and the command line use this package, which imports neither of them. This file imports
nothing, so that each module can be used without the dependencies of the others.
"""
