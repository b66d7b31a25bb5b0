"""The service: processes and their duties. Import from the front door, ``shmbuffer``.

    coordinator, tenure        a run from start to end; its hold on the directory
    buffer_config              the requested settings, against those of the directory
    supervisor, spawned        starts, watches, reaps and restarts collectors; one process of them
    roster, orphans            who was spawned and lives; what a killed coordinator left running
    stopping                   ends processes that are not our children
    client, recovery           attach(), from any process; what is left of a dead run

Nothing is imported here, so that what needs no torch starts without it.
"""
