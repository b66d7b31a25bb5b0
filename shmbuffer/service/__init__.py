"""The coordinator of a run and its child processes. Import public names from ``shmbuffer``.

coordinator, run_directory the coordinator of a run; the directory that it locks and removes
buffer_config              arguments of the coordinator, compared with the recorded settings
supervisor, children       starts, watches and restarts child processes; the state of each child
process                    a spawned process, which imports and calls its target
main_module                checks that a spawned process can import the main module
stopping                   ends the processes that use a directory, without being their parent
client, recover            attach(), for any process; the recovery after a crash

This file imports nothing, so that a program can use one of the modules without loading torch.
"""
