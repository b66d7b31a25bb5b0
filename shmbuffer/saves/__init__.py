"""Saves: snapshots of a buffer in files, and the code that publishes these files.

safe_files, file_tree, work_directory, publication   create, read and publish files
saved_parts, values, plain, tickets, checkpoints     the parts of a buffer in a save
checkpointers/                                       save and load each kind of storage
parquet_columns, parquet_file, export                files for other programs
"""
