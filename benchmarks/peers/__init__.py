"""Other libraries as compared libraries. Each module runs in the interpreter of its library.

These modules do not import shmbuffer, which need not be installed there. `benchmarks.peer`
describes the requests, and `benchmarks/environments` lists the packages of each environment.
"""
