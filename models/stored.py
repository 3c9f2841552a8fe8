"""A tensor that is still in its file: a rank reads of it only the share that it keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StoredTensor:
    """One tensor of an open safetensors file (safe_open's handle), read where it is asked for and no sooner."""

    def __init__(self, archive: Any, name: str) -> None:
        self._archive = archive
        self._name = name
        self._slice = archive.get_slice(name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice.get_shape())

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """As Tensor.narrow; only these rows or columns are read."""
        return self._slice[(slice(None),) * dim + (slice(start, start + length),)]

    def read(self) -> Tensor:
        """All of it."""
        return self._archive.get_tensor(self._name)
