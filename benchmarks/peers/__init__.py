"""Other libraries, each as a benchmark sees it; a module is run by the interpreter that has it.

None of them imports shmbuffer, which need not be installed there; see `benchmarks.peer` for what
they read and write, and `benchmarks/environments` for what is in their environments.
"""
