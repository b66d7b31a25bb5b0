"""Monitors the current and past activity of a buffer, for users and for other programs.

    counters ──▶ stats ──▶ loggers, metrics          numbers for a training script and Prometheus
       └──────▶ historian ──▶ memory/history_writer  recorded by the coordinator once per second
    inspect, item_stats, history ──▶ buffer_state ──▶ findings, report   problems; one picture
    inspect, inspect, ...    ──▶ pace, events ──▶ panels, screen, live      a live view

The service and the command line import this package, but not the other way round. This file imports
nothing, so that each module can be used without the dependencies of the others.
"""
