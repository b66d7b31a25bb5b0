"""The processes of a run and their duties. Import public names from ``shmbuffer``.

coordinator, run_directory the run from start to end; the directory that it locks and removes
buffer_config              requested settings, compared with those of the directory
children, supervisor       the processes of the coordinator; starts, watches, restarts them
process                    a spawned process, and the search for its target
main_module                checks that a spawned process can import the main module
stopping                   ends processes of a directory that are not children
client, recovery           attach(), from any process; the recovery of a dead run

This package imports nothing, so that programs without torch do not load it.
"""
