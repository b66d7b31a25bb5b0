"""The processes of a run and their duties. Import from the front door, ``shmbuffer``.

    coordinator, tenure        a run from start to end; its hold on the directory
    buffer_config              requested settings, compared with those of the directory
    supervisor, spawned        starts, watches, reaps and restarts collectors; one such process
    roster, orphans            spawned processes; those that a killed coordinator left running
    stopping                   ends processes that are not our children
    client, recovery           attach(), from any process; the recovery of a dead run

Nothing is imported here, so that a program without torch stays without it.
"""
