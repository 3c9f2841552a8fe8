"""ForwardBatch: what the layers need to know of one step, as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Leading blocks that several of a step's decodes have in common, which a backend may read once for a whole tile.

    members  int32 [tiles, n]  a tile's decodes, by their places in the step; -1: none. The first place is taken
    lens     int32 [tiles]     tokens of what they share, whole blocks, less than any of their contexts; 0: no tile
    skipped  int32 [N]         of each decode, the leading tokens that its tile covers; 0: it is in none
    """

    members: torch.Tensor
    lens: torch.Tensor
    skipped: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """One ragged step: S sequences, T tokens, decodes (one token each) first, then prefill chunks.

    input_ids, positions   int64 [T]     token ids and their absolute positions in the sequence
    slot_mapping           int64 [T]     where each token's key and value go: block * block_size + offset
    query_lens             list[int], S  new tokens of each sequence in this step (1 for a decode)
    context_lens           list[int], S  tokens of each sequence after this step (cached + new)
    block_tables           int32 [S, W]  physical block ids; row s is valid up to
                                         ceil(context_lens[s] / block_size), the rest is padding
    block_lists            list of S     the same tables as Python lists (block ids), for backends that
                                         plan on the host
    num_decodes            sequences 0..num_decodes-1 have one new token and no further prompt to compute
    logits_indices         int64 [R]     rows of the hidden states whose logits the sampler needs
    scratch                dict          what a backend keeps from the step's first layer to its last
    query_start            int32 [S + 1] first row of each sequence, and T, on the device; None where the backend
                                         does not want it (AttentionBackend.wants_device_lengths)
    context_lens_tensor    int32 [S]     context_lens on the device; None likewise
    shared                 what decodes have in common, on the device; None where nobody has looked
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    block_lists: list[list[int]]
    num_decodes: int
    block_size: int
    logits_indices: torch.Tensor
    scratch: dict
    query_start: torch.Tensor | None = None
    context_lens_tensor: torch.Tensor | None = None
    shared: SharedPrefixes | None = None
