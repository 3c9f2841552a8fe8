"""Origin: what a request's blocks are stamped with, and whom they may serve."""

from __future__ import annotations

from dataclasses import dataclass

from engine.shown import shown

MAX_STAMP = 2**31 - 1
MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from.

    owner       its conversation, a small integer; 0 means nobody in particular
    turn        the turn of the conversation, from 1; 0 means none
    cache_salt  blocks serve only requests of the same salt; "" is a salt like any other

    Raises ValueError naming field, value and range.
    """

    owner: int = 0
    turn: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for name, value in (("owner", self.owner), ("turn", self.turn)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STAMP:
                raise ValueError(f"{name}={shown(value)} must be an integer from 0 to {MAX_STAMP}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise ValueError(f"cache_salt={shown(self.cache_salt)} must be text of at most {MAX_SALT_CHARS} characters")

    @property
    def salt(self) -> bytes:
        """cache_salt as it enters the hashes of blocks."""
        return self.cache_salt.encode("utf-8", "surrogatepass")
