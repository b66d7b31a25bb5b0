# Which tests of the memory floor scripts/sanitize runs, and which of them scripts/test runs plainly: between them, all.

# Python that calls nothing of the core, or only what opens and closes files: sanitizers find nothing there.
PYTHON_ONLY=(tests/memory/test_{region,filesystem,identity,locks,cleanup,schema,writeback,residency,history}.py)
# Arithmetic, which the compiler may change where it optimises: sanitizers leave most optimisations out.
OPTIMISED=(tests/memory/test_{checksum,masses,priorities}.py)
