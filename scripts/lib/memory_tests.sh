# Which tests of the memory floor scripts/sanitize runs, and which of them scripts/test runs plainly: between them, all.

# Python that calls nothing of the core, or only what opens and closes files: sanitizers find nothing there.
PYTHON_ONLY=(tests/memory/{system/test_{region,filesystem,identity,writeback,residency},directory/test_{locks,cleanup},format/test_schema,upkeep/test_history}.py)
# Arithmetic, which the compiler may change where it optimises: sanitizers leave most optimisations out.
OPTIMISED=(tests/memory/{format/test_checksum,ring/test_priorities}.py)
