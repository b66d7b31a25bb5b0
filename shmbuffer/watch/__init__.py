"""Monitoring: the activity of a buffer, now and in the past, for people and programs.

    counters ──▶ stats ──▶ loggers, metrics          numbers, for a training script and Prometheus
       └──────▶ historian ──▶ memory/history_writer  recorded by the coordinator, each second
    inspect, item_stats, history ──▶ look ──▶ findings, report      problems; one picture
    inspect, inspect, ...    ──▶ pace, changes ──▶ panels, screen, live      a live view

The service and the command line use it; it imports neither. This package imports none of its
modules, so that each starts without the dependencies of the others.
"""
