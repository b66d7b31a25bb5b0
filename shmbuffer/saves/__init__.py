"""Saves: the files of a buffer at one moment, and how they are put into place.

safe_files, file_tree, work_directory, publication   create, read and publish files
parts, values, plain, tickets, checkpoints           what the parts of a buffer save
checkpointers/                                       how each storage is saved and loaded
parquet_columns, parquet_file, export                files for other programs
"""
