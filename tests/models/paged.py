"""A minimal paged loop over a model, for tests below the engine: one or more sequences, scattered blocks."""

from __future__ import annotations

import random

import torch

from models.batch import ForwardBatch


class PagedRunner:
    """Runs steps of one model over its own KV pool and keeps every sequence's block list.

    scatter=True hands out blocks in random order; otherwise each sequence gets one ascending run. last_only=True
    asks the model for the logits of every chunk's last token only, as serving does.
    """

    def __init__(
        self, model, *, block_size=16, num_blocks=256, dtype=torch.float32, scatter=False, seed=0, last_only=False
    ):
        config = model.config
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype)
        model.bind_kv_cache(self.kv)
        self.model = model
        self.last_only = last_only
        self.block_size = block_size
        self.free = list(range(num_blocks))
        if scatter:
            random.Random(seed).shuffle(self.free)

    def reserve(self, tokens: int) -> list[int]:
        """Blocks for a sequence of up to that many tokens."""
        count = -(-tokens // self.block_size)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    @torch.inference_mode()
    def step(self, chunks: list[tuple[list[int], int, list[int]]]) -> list[torch.Tensor]:
        """chunks: (new token ids, tokens cached before them, blocks) of each sequence, decodes first.
        Returns each sequence's logits [new, vocab], [1, vocab] with last_only."""
        size = self.block_size
        ids = [token for new, _, _ in chunks for token in new]
        positions = [cached + i for new, cached, _ in chunks for i in range(len(new))]
        slots = [
            blocks[p // size] * size + p % size
            for new, cached, blocks in chunks
            for p in range(cached, cached + len(new))
        ]
        width = max(len(blocks) for _, _, blocks in chunks)
        tables = [blocks + [0] * (width - len(blocks)) for _, _, blocks in chunks]
        lengths = [len(new) for new, _, _ in chunks]
        ends = torch.tensor(lengths).cumsum(0) - 1
        batch = ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_lens=lengths,
            context_lens=[cached + len(new) for new, cached, _ in chunks],
            block_tables=torch.tensor(tables, dtype=torch.int32),
            block_lists=[blocks for _, _, blocks in chunks],
            num_decodes=sum(1 for new, cached, _ in chunks if len(new) == 1 and cached),
            block_size=size,
            logits_indices=ends if self.last_only else torch.arange(len(ids)),
            scratch={},
        )
        logits = self.model.compute_logits(self.model(batch))
        return list(logits.split(1 if self.last_only else lengths))

    def greedy(self, prompts: list[list[int]], new_tokens: int, chunk: int = 10_000) -> list[list[int]]:
        """Greedy continuations of all prompts in one batch, each prompt prefilled in chunks of `chunk` tokens."""
        blocks = [self.reserve(len(prompt) + new_tokens) for prompt in prompts]
        done = [0] * len(prompts)
        sequences = [list(prompt) for prompt in prompts]
        targets = [len(prompt) + new_tokens for prompt in prompts]
        while any(len(s) < t for s, t in zip(sequences, targets, strict=True)):
            live = [i for i, s in enumerate(sequences) if len(s) < targets[i]]
            live.sort(key=lambda i: len(sequences[i]) - done[i] > 1)  # decodes first
            chunks = [(sequences[i][done[i] : done[i] + chunk], done[i], blocks[i]) for i in live]
            for i, (new, cached, _), logits in zip(live, chunks, self.step(chunks), strict=True):
                done[i] = cached + len(new)
                if done[i] == len(sequences[i]):
                    sequences[i].append(int(logits[-1].argmax()))
        return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
