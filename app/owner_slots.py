"""OwnerSlots: small integers that stand for chats on KV blocks, so that no chat's id leaves the server."""

from __future__ import annotations

from collections import OrderedDict

MAX_SLOT = 65_535  # the panel's frames carry 16 bits; 0 means nobody


class OwnerSlots:
    """Gives each chat a slot from 1 to `size`, stable while it is used; when all are taken, the chat that was not
    used for longest loses its slot."""

    def __init__(self, size: int = MAX_SLOT) -> None:
        self._size = size
        self._slots: OrderedDict[str, int] = OrderedDict()

    def known(self, chat_id: str) -> int:
        """The chat's slot if it has one, else 0; looking does not count as use."""
        return self._slots.get(chat_id, 0)

    def slot(self, chat_id: str) -> int:
        """The chat's slot; asking counts as use."""
        slot = self._slots.pop(chat_id, None)
        if slot is None:
            if len(self._slots) < self._size:
                slot = len(self._slots) + 1
            else:
                _, slot = self._slots.popitem(last=False)
        self._slots[chat_id] = slot
        return slot
