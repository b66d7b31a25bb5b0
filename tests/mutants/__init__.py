"""Seeded protocol bugs, each of which the tests have to notice.

A mutant is a patch of a few lines that removes a rule of the protocol: `NN-name.patch`, with a
header that says what is broken and which tests catch it. The tests of a rule are as good as the
mutants that they kill: one that survives shows a test that is missing.
"""
