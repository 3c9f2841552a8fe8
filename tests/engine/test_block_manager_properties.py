"""BlockManager alone, in pools of 2 to 8 blocks, against a plain record of what was written where."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import BlockManager
from engine.block_records import CACHED
from engine.explain import explain
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

# Few distinct heads of every length, so that prefixes meet in the pool all the time.
PROMPTS = st.builds(
    lambda head, repeats, tail: ([1, 2, 3, 4, 5, 6, 7, 8] * repeats)[:head] + tail,
    st.sampled_from([4, 8, 8, 12, 16, 16, 3, 17, 24]),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
SALTS = st.sampled_from([b"", b"", b"", b"a"])


class PoolMachine(RuleBasedStateMachine):
    """`written` is the record: block -> (salt, every token up to the block's end), from the moment it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.written: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.ids = 0

    @initialize(num_blocks=st.integers(2, 8), block_size=st.sampled_from([1, 4, 16]))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)

    @rule(tokens=PROMPTS, salt=SALTS, owner=st.integers(0, 3), keep=st.booleans(), computed=st.booleans())
    def request(self, tokens: list[int], salt: bytes, owner: int, keep: bool, computed: bool) -> None:
        """A prompt comes and, where it finds room, is computed or not yet, and stays or ends."""
        seq = self.admit(tokens, salt, owner)
        if seq is not None and computed:
            self.compute(seq, len(seq.token_ids))
        if seq is not None and not keep:
            self.live.remove(seq)
            self.blocks.release(seq)

    def admit(self, tokens: list[int], salt: bytes, owner: int) -> Sequence | None:
        self.ids += 1
        seq = self.sequence(tokens, salt, owner)
        told = explain(self.blocks, self.sequence(tokens, salt, owner))
        matched = self.blocks.match_prefix(seq)
        self.check_hits(seq, matched)
        assert self.blocks.resident_prefix(self.sequence(tokens, salt, owner)) == len(matched)
        assert tuple(matched) == told.hit_blocks
        fits = self.blocks.can_admit(seq, matched)
        assert fits == (told.num_missing == 0)
        if not fits:
            return None
        order = list(self.blocks.eviction_order())
        assert [block for block, _ in told.evicted] == [b for b in order if b not in matched][: len(told.evicted)]
        before = dict(self.written)
        self.blocks.admit(seq, matched)
        self.live.append(seq)
        taken = seq.block_table[len(matched) :]
        assert len(taken) == told.num_new_blocks
        assert {b for b in taken if b in before} == {block for block, _ in told.evicted}
        for block in taken:
            self.written.pop(block, None)
        return seq

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = data.draw(st.sampled_from(self.live))
        held, available = list(seq.block_table), self.blocks.num_available
        missing = self.blocks.blocks_for(len(seq.token_ids) + len(tokens)) - len(held)
        grown = self.blocks.grow(seq, len(seq.token_ids) + len(tokens))
        assert grown == (missing <= available)
        if not grown:
            assert seq.block_table == held
            return
        seq.token_ids += tokens
        for block in seq.block_table[len(held) :]:
            self.written.pop(block, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute_some(self, data: st.DataObject) -> None:
        """Some of a sequence's tokens have been computed, as after a step."""
        seq = data.draw(st.sampled_from(self.live))
        self.compute(seq, data.draw(st.integers(seq.num_computed_tokens, len(seq.token_ids))))

    def compute(self, seq: Sequence, count: int) -> None:
        seq.num_computed_tokens = count
        self.blocks.index_full_blocks(seq)
        for position in range(seq.num_computed_tokens // self.blocks.block_size):
            end = (position + 1) * self.blocks.block_size
            self.written[seq.block_table[position]] = (seq.salt, tuple(seq.token_ids[:end]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.blocks.release(seq)
        assert seq.block_table == []

    @precondition(lambda self: self.written)
    @rule(owner=st.integers(1, 3))
    def pin(self, owner: int) -> None:
        before = self.blocks.pins.num_blocks
        try:
            count = self.blocks.pin(owner)
        except ValueError:
            assert self.blocks.pins.num_blocks == before
            return
        pinned = self.blocks.pins.blocks(owner)
        assert count == len(pinned)
        # Every chain can be found from its beginning among the pinned blocks alone.
        chains = {self.written[block] for block in pinned}
        size = self.blocks.block_size
        assert all((salt, tokens[:-size]) in chains for salt, tokens in chains if len(tokens) > size)

    @precondition(lambda self: self.blocks.pins.owners())
    @rule(owner=st.integers(1, 3))
    def unpin(self, owner: int) -> None:
        self.blocks.unpin(owner)
        assert owner not in self.blocks.pins

    @precondition(lambda self: self.blocks._idle.kept)
    @rule()
    def give_a_pin_up(self) -> None:
        owners = self.blocks.pins.owners()
        assert self.blocks.release_pin_for(self.sequence([0], b"", 0))
        assert len(self.blocks.pins.owners()) == len(owners) - 1

    @precondition(lambda self: self.blocks.num_cached > 3)
    @rule()
    def clear(self) -> None:
        cached = set(self.blocks.eviction_order())
        assert self.blocks.clear_cache() == len(cached)
        for block in cached:
            del self.written[block]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity(self.live)
        snapshot = self.blocks.snapshot()
        assert {b for b in self.written if b not in self.held()} == set(
            (snapshot.state == CACHED).nonzero()[0].tolist()
        )
        assert all(snapshot.pinned[b] <= (b in self.written) for b in range(self.blocks.num_blocks))

    def held(self) -> set[int]:
        return {block for seq in self.live for block in seq.block_table}

    def check_hits(self, seq: Sequence, matched: list[int]) -> None:
        size = self.blocks.block_size
        for position, block in enumerate(matched):
            assert self.written[block] == (seq.salt, tuple(seq.token_ids[: (position + 1) * size]))
        following = (seq.salt, tuple(seq.token_ids[: (len(matched) + 1) * size]))
        if (len(matched) + 1) * size < len(seq.token_ids):
            assert following not in self.written.values(), "a block that is there was not found"

    def sequence(self, tokens: list[int], salt: bytes, owner: int) -> Sequence:
        return Sequence(
            self.ids, tokens, SamplingParams(), seed=0, max_tokens=8, stop_ids=frozenset(), owner=owner, salt=salt
        )


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
