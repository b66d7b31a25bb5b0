"""The machine says no: every call of libc on a buffer's files fails, once and from then on."""
