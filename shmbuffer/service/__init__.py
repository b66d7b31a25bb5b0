"""The service: processes and their duties. Import from the front door, ``shmbuffer``.

    coordinator.py   a run, from its start to its end
    tenure.py        its hold on the directory: taken or made, left or removed
    buffer_config.py what it was asked for, beside what the directory says
    supervisor.py    starts, watches, reaps and restarts collectors
    orphans.py       what a killed coordinator has left running
    spawned.py       one process that was started, seen from both ends
    roster.py        who was spawned, under which name, and whether it lives
    stopping.py      how processes are ended that are not our children
    client.py        attach(), from any process
    recovery.py      what is left of a dead run

Nothing is imported here, so that what needs no torch starts without it.
"""
