"""Seeded protocol bugs, each of which the tests have to notice.

A mutant is a patch of a few lines that removes a rule of the protocol: `NN-name.patch`. Its header
says what is broken and which tests catch it. A mutant that survives shows that a test is missing.
"""
