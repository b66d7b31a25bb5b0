"""The processes of a run. Import public names from ``shmbuffer``.

coordinator, run_directory the coordinator of a run; the directory that it locks and removes
buffer_config              requested settings, compared with those of the directory
children, supervisor       the child processes; starts, watches and restarts them
process                    a spawned process, and the import of its target
main_module                checks that a spawned process can import the main module
stopping                   ends processes of a directory that are not children
client, recover            attach(), for any process; the recovery after a crash

This file imports nothing, so that a program can use one of the modules without loading torch.
"""
