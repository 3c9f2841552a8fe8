"""What a captured step does first: its rows' block tables and input ids, from what the host sent and what is there.

A sequence's table lies on the device; the host sends the block of the step's last token, which may be new. The id of a
decode's token may be unknown to the host, which launches a step before it has read what the one before drew: then it
sends the row in which that drew it.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


def step_rows(
    tables: Tensor,
    table_rows: Tensor,
    blocks: Tensor,
    context_lens: Tensor,
    sources: Tensor,
    drawn: Tensor,
    *,
    block_size: int,
    input_ids: Tensor,
    step_tables: Tensor,
) -> None:
    """Fills step_tables, each row as far as its context goes, and the input ids whose source is not negative.

    tables        int32 [rows + 1, W] contiguous, of all sequences; the step's blocks are written there, too
    table_rows    int64 [S], rows of tables
    blocks        int32 [S], the block of each row's last token
    context_lens  int32 [S], tokens of each sequence after the step; 0: padding
    sources       int32 [S], of a decode whose token is unknown the row of `drawn` that holds it, otherwise -1
    drawn         int64 [D], tokens that the step before has drawn; a negative one is taken as 0
    input_ids     int64 [T], T >= S wherever a source is not negative
    step_tables   int32 [S, W] contiguous
    """
    assert tables.is_contiguous() and step_tables.is_contiguous() and tables.shape[1] == step_tables.shape[1]
    _step_rows[(table_rows.shape[0],)](
        tables,
        table_rows,
        blocks,
        context_lens,
        sources,
        drawn,
        input_ids,
        step_tables,
        tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


def reference(
    tables: Tensor,
    table_rows: Tensor,
    blocks: Tensor,
    context_lens: Tensor,
    sources: Tensor,
    drawn: Tensor,
    *,
    block_size: int,
    input_ids: Tensor,
    step_tables: Tensor,
) -> None:
    for row, (table, context, source) in enumerate(
        zip(table_rows.tolist(), context_lens.tolist(), sources.tolist(), strict=True)
    ):
        if source >= 0:
            input_ids[row] = drawn[source].clamp(min=0)
        if context:
            count = (context - 1) // block_size + 1
            tables[table, count - 1] = blocks[row]
            step_tables[row, :count] = tables[table, :count]


@triton.jit(do_not_specialize=["width"])
def _step_rows(
    tables,
    table_rows,
    blocks,
    context_lens,
    sources,
    drawn,
    input_ids,
    step_tables,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(sources + row)
    if source >= 0:
        tl.store(input_ids + row, tl.maximum(tl.load(drawn + source), 0))
    context = tl.load(context_lens + row)
    if context > 0:
        last = (context - 1) // BLOCK_SIZE
        block = tl.load(blocks + row)
        table = tables + tl.load(table_rows + row) * width
        target = step_tables + row.to(tl.int64) * width
        for first in range(0, last + 1, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column <= last
            value = tl.load(table + column, mask=inside, other=0)
            tl.store(target + column, tl.where(column == last, block, value), mask=inside)
        tl.store(table + last, block)
