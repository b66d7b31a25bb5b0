"""Defines the errors: one class for each error that a caller may want to handle.

    ShmBufferError
    ├── UnsupportedPlatformError   not Linux with glibc on x86-64 or aarch64
    ├── SchemaMismatchError        the data do not match the schema (also a RuntimeError)
    ├── FormatError                not a file of shmbuffer
    │   └── IncompatibleVersionError   a file of another version or type of machine
    ├── CorruptBufferError         a file is damaged
    ├── UnsafePathError            a link, a FIFO, or a file of another owner was not opened
    ├── UnsafeFilesystemError      shared maps are not reliable on a network file system
    ├── ReadOnlyError              the directory cannot be written (also a PermissionError)
    ├── SpaceError                 there is not enough space (also an OSError, ENOSPC)
    ├── BufferExistsError          a buffer exists already (also FileExistsError, RuntimeError)
    ├── BufferNotFoundError        the directory contains no buffer (also a FileNotFoundError)
    ├── BufferInUseError           living processes use the buffer
    ├── BufferClosedError          a handle was used after it was closed (also a RuntimeError)
    │   └── BufferUnlinkedError    the directory was removed while the handle was open
    ├── BufferNeedsRestart         the control page is damaged
    ├── EmptyBufferError           there is no item to sample (also a RuntimeError)
    ├── RegistryFullError          256 living clients use the buffer
    ├── ForkedHandleError          a handle was used after a fork, but its buffer no longer exists
    ├── DurabilityError            a sync failed, so data may be lost (also an OSError)
    ├── AttachTimeout              another process was not ready in time (also a TimeoutError)
    ├── LockTimeout                a living process keeps the mutex (also a TimeoutError)
    ├── RingOverrunError           a living writer still fills the next slot (also a TimeoutError)
    ├── ReservationLostError       the reservation has ended
    ├── RecordTooLargeError        a write needs more bytes than the ring has (also a ValueError)
    ├── ConsumerError              the consumer was removed, or cannot be used in this way
    └── RateLimitError             the rate limiter can never admit the call
        ├── CollectorsDiedError        all collectors for which a sample waits have died
        └── RateLimitTimeout           a call was not admitted in time (also a TimeoutError)

A message says what happened, where, and what to do. Values in the message, such as paths and pids,
are also attributes of the error. Errors are sent between processes, so they are pickled with their
attributes.
"""

from __future__ import annotations

import errno
from typing import Any


class ShmBufferError(Exception):
    """Base class for the errors that shmbuffer defines.

    Args:
        message: description of what happened, where, and what to do.
        **parts: values that the message contains. Each becomes an attribute.
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
    """This platform has no reliable robust mutex that processes can share."""


class SchemaMismatchError(ShmBufferError, RuntimeError):
    """The leaves of a write do not match the schema of the buffer. Nothing was changed."""


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
    """There is not enough space. No incomplete file was left.

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
    """The directory was removed or replaced while the handle was open."""


class BufferNeedsRestart(ShmBufferError):  # noqa: N818 - the name says what to do
    """The control page is no longer reliable. Close all handles, then recover the buffer."""


class EmptyBufferError(ShmBufferError, RuntimeError):
    """The buffer contains no item to sample."""


class RegistryFullError(ShmBufferError):
    """All 256 entries belong to living clients. Attributes: ``pids``."""


class ForkedHandleError(ShmBufferError, RuntimeError):
    """A handle was inherited through ``fork``, and its buffer was then removed or redefined."""


class DurabilityError(ShmBufferError, OSError):
    """A sync to disk failed. The data in memory are usable, but may not survive a power cut."""


class AttachTimeout(ShmBufferError, TimeoutError):  # noqa: N818 - named like other timeouts
    """Another process did not create or recover the buffer in time. Attributes: ``pids``."""


class LockTimeout(ShmBufferError, TimeoutError):  # noqa: N818 - named like AttachTimeout
    """A living process has held the buffer's mutex for too long. Attributes: ``tid``, ``pid``."""


class RingOverrunError(ShmBufferError, TimeoutError):
    """A living writer is still filling the next slot. Attributes: ``pid``, ``state``."""


class ReservationLostError(ShmBufferError):
    """The reservation was committed or released, its lease ended, or its holder seemed dead."""


class RecordTooLargeError(ShmBufferError, ValueError):
    """The records of one write need more bytes than the byte ring has. Nothing was changed."""


class ConsumerError(ShmBufferError):
    """A consumer was removed, has other settings or too many unacknowledged batches, or is missing.

    Also raised if a buffer already has eight consumers. Attributes: ``name``, if the error names a
    consumer.
    """


class RateLimitError(ShmBufferError):
    """The rate limiter can never admit the call, or does not allow it to wait.

    Waiting is not allowed if no client is alive that could end the wait. Attributes: ``pids``, the
    pids of the living clients on the other side, which insert or sample.
    """


class CollectorsDiedError(RateLimitError):
    """All collectors that a coordinator has spawned have died, and none will be restarted.

    Attributes: ``collectors``, the name, exit code and last exception of each collector, and
    ``pids``, which is empty. A negative exit code is the number of a signal.
    """


class RateLimitTimeout(RateLimitError, TimeoutError):  # noqa: N818 - named like AttachTimeout
    """The rate limiter did not admit the call in time. Attributes: ``pids``."""
