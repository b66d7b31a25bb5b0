"""Watching: what a buffer does and did, for people, programs and pictures.

    counters ──▶ stats ──▶ loggers, metrics          numbers, for a training script and Prometheus
       └──────▶ historian ──▶ memory/history_writer  the coordinator records, each second
    inspect, item_stats, history ──▶ look ──▶ findings, report      what looks wrong; one picture
    inspect, inspect, ...    ──▶ pace, changes ──▶ panels, screen, live      seen as it happens

The service calls it, and the command line shows it; it knows neither. Nothing is imported here, so
that each part starts without the others' packages.
"""
