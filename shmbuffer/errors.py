"""Defines the errors: one class for each error that a caller may want to handle.

    ShmBufferError
    ├── UnsupportedPlatformError   not Linux with glibc on x86-64 or aarch64
    ├── SchemaMismatchError        not the leaves of this buffer (also a RuntimeError)
    ├── FormatError                not a file of shmbuffer
    │   └── IncompatibleVersionError   of another version or kind of machine
    ├── CorruptBufferError         path, what was expected and what was found
    ├── UnsafePathError            a link, a FIFO, another owner: not opened
    ├── UnsafeFilesystemError      a network file system: its shared maps cannot be relied on
    ├── ReadOnlyError              the directory cannot be written (also a PermissionError)
    ├── SpaceError                 bytes needed and bytes free (also an OSError, ENOSPC)
    ├── BufferExistsError          a buffer exists already (also FileExistsError, RuntimeError)
    ├── BufferNotFoundError        no buffer exists there (also a FileNotFoundError)
    ├── BufferInUseError           living processes use it: pids
    ├── BufferClosedError          handle used after close (also a RuntimeError)
    │   └── BufferUnlinkedError    the directory was removed under a running handle
    ├── BufferNeedsRestart         the control page is damaged: close all handles, then recover
    ├── EmptyBufferError           no item to sample (also a RuntimeError)
    ├── RegistryFullError          256 living clients: pids
    ├── ForkedHandleError          handle used after fork; its buffer was removed or redefined
    ├── DurabilityError            a sync failed: data may never reach the disk (also an OSError)
    ├── AttachTimeout              another process was not ready in time (also a TimeoutError)
    ├── LockTimeout                a living process keeps the mutex (also a TimeoutError)
    ├── RingOverrunError           a living writer still fills the next slot (also a TimeoutError)
    ├── ReservationLostError       the reservation has ended
    ├── RecordTooLargeError        a write needs more bytes than the ring has (also a ValueError)
    ├── ConsumerError              the consumer was removed, or cannot be used like this: name
    └── RateLimitError             the rate limiter can never admit the call: pids
        ├── CollectorsDiedError        a sample waits for spawned collectors that have all died
        └── RateLimitTimeout           the limiter did not admit it in time (also a TimeoutError)

A message says what happened, where, and what to do. Its parts are attributes of the error. Errors
are sent between processes and are therefore pickled with their attributes.
"""

from __future__ import annotations

import errno
from typing import Any


class ShmBufferError(Exception):
    """Base class of the errors that shmbuffer defines.

    Args:
        message: description of what happened, where, and what to do.
        **parts: values that the message contains; each becomes an attribute.
    """

    def __init__(self, message: str, **parts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.parts = parts
        for name, value in parts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.parts)


def _rebuild(cls: type[ShmBufferError], message: str, parts: dict[str, Any]) -> ShmBufferError:
    return cls(message, **parts)


class UnsupportedPlatformError(ShmBufferError):
    """This machine has no reliable robust process-shared mutex."""


class SchemaMismatchError(ShmBufferError, RuntimeError):
    """The leaves of a write do not match the schema of the buffer; nothing was changed."""


class FormatError(ShmBufferError):
    """The file was not written by shmbuffer."""


class IncompatibleVersionError(FormatError):
    """The file has a different format version, or was written on a different kind of machine."""


class CorruptBufferError(ShmBufferError):
    """A file of the buffer is damaged."""


class UnsafePathError(ShmBufferError):
    """A path is not a plain file or directory of this user, so it was not opened."""


class UnsafeFilesystemError(ShmBufferError):
    """Shared maps, file locks or reserved space are not reliable on this file system."""


class ReadOnlyError(ShmBufferError, PermissionError):
    """The directory or a file in it cannot be written."""


class SpaceError(ShmBufferError, OSError):
    """There is not enough space; no partial file was left.

    Attributes: ``needed_bytes``, ``free_bytes``.
    """

    def __init__(self, message: str, **parts: Any) -> None:
        super().__init__(message, **parts)
        self.errno = errno.ENOSPC


class BufferExistsError(ShmBufferError, FileExistsError, RuntimeError):
    """The directory already contains a buffer, and ``on_existing`` does not allow its use."""


class BufferNotFoundError(ShmBufferError, FileNotFoundError):
    """There is no buffer in that directory."""


class BufferInUseError(ShmBufferError):
    """Living processes use the buffer. Attributes: ``pids``."""


class BufferClosedError(ShmBufferError, RuntimeError):
    """The handle was closed, or the buffer is being removed."""


class BufferUnlinkedError(BufferClosedError):
    """The directory was removed or replaced under a running handle."""


class BufferNeedsRestart(ShmBufferError):  # noqa: N818 - says what to do, like a stop sign
    """The control page is no longer reliable: close every handle, then recover the buffer."""


class EmptyBufferError(ShmBufferError, RuntimeError):
    """The buffer has no item to sample."""


class RegistryFullError(ShmBufferError):
    """All 256 entries belong to living clients. Attributes: ``pids``."""


class ForkedHandleError(ShmBufferError, RuntimeError):
    """A handle was inherited through ``fork``, and its buffer was then removed or redefined."""


class DurabilityError(ShmBufferError, OSError):
    """A sync to disk failed. The data in memory are usable, but may not survive a power cut."""


class AttachTimeout(ShmBufferError, TimeoutError):  # noqa: N818 - the field's name for it
    """Another process did not create or recover the buffer in time. Attributes: ``pids``."""


class LockTimeout(ShmBufferError, TimeoutError):  # noqa: N818 - beside AttachTimeout
    """A living process has held the buffer's mutex for too long. Attributes: ``tid``, ``pid``."""


class RingOverrunError(ShmBufferError, TimeoutError):
    """A living writer is still filling the next slot. Attributes: ``pid``, ``state``."""


class ReservationLostError(ShmBufferError):
    """The reservation was committed or released, its lease ended, or its holder seemed dead."""


class RecordTooLargeError(ShmBufferError, ValueError):
    """The records of one write need more bytes than the byte ring has; nothing was changed."""


class ConsumerError(ShmBufferError):
    """The consumer was removed, exists with a different count, or would be the ninth: ``name``."""


class RateLimitError(ShmBufferError):
    """The call can never be admitted, or has no peer to wait for and the limiter forbids waiting.

    Attributes: ``pids``, the pids of the living clients on the other side.
    """


class CollectorsDiedError(RateLimitError):
    """All collectors that a coordinator has spawned have died, and none will be restarted.

    Attributes: ``collectors``, the name, exit code (negative: a signal) and last exception of each;
    ``pids``, which is empty.
    """


class RateLimitTimeout(RateLimitError, TimeoutError):  # noqa: N818 - beside AttachTimeout
    """The rate limiter did not admit the call in time. Attributes: ``pids``."""
