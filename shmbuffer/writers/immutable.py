"""Writer that rejects all writes, for a fixed data set."""

from __future__ import annotations

from typing import Any, NoReturn

from shmbuffer.writers.writer import Writer


class ImmutableDatasetWriter(Writer):
    """Writer for fixed data sets: ``add``, ``extend`` and ``empty`` raise RuntimeError.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import ImmutableDatasetWriter, ReplayBuffer
        >>> from shmbuffer import TensorStorage
        >>> data = TensorDict({"obs": torch.arange(4)}, [4])
        >>> rb = ReplayBuffer(
        ...     storage=TensorStorage(data),
        ...     writer=ImmutableDatasetWriter(),
        ...     batch_size=2,
        ... )
        >>> rb.sample().shape
        torch.Size([2])

    Source: ``torchrl.data.ImmutableDatasetWriter``.
    """

    WRITING_ERR = "this buffer contains a read-only data set"

    def add(self, data: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(_refusal("an item cannot be added"))

    def extend(self, data: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(_refusal("a batch cannot be added"))

    def _empty(self, empty_write_count: bool = True) -> NoReturn:
        raise RuntimeError(_refusal("the buffer cannot be emptied"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}  # the unpickled buffer registers it again


def _refusal(what: str) -> str:
    return (
        f"{ImmutableDatasetWriter.WRITING_ERR}: {what}. To write, use another writer, for example "
        "set_writer(RoundRobinWriter())"
    )
