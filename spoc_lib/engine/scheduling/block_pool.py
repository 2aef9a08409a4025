"""The pool of KV blocks: the free queue and the index of findable blocks (rules: see `kv_cache`)."""

from __future__ import annotations

from collections import OrderedDict


class Block:
    """A block in use or findable. `key` is None while nobody can find it; `users` hold it now."""

    __slots__ = ("group", "key", "users")

    def __init__(self, group: int) -> None:
        self.group = group
        self.key: bytes | None = None
        self.users = 1


class BlockPool:
    """Free blocks and the index of findable ones. Anonymous free blocks are only counted."""

    def __init__(self, num_blocks: int, groups: int, caching: bool) -> None:
        self.size = num_blocks - 1
        self.caching = caching
        self.unhashed = self.size
        self.lru: OrderedDict[Block, None] = OrderedDict()
        self.index: list[dict[bytes, list[Block]]] = [{} for _ in range(groups)]

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return self.unhashed + len(self.lru)

    def take(self, count: int, group: int) -> list[Block]:
        """`count` blocks for `group`: unhashed ones first, then the least recently freed hashed ones."""
        fresh = min(count, self.unhashed)
        self.unhashed -= fresh
        for _ in range(count - fresh):
            block, _ = self.lru.popitem(last=False)
            if block.key is not None:  # always so in the LRU
                self._forget(block, block.key)
        return [Block(group) for _ in range(count)]

    def release(self, blocks: list[Block]) -> None:
        """Free blocks in the given order, first evicted first. Null blocks (None) pass."""
        for block in blocks:
            if block is None:
                continue
            block.users -= 1
            if block.users == 0:
                if block.key is None:
                    self.unhashed += 1
                else:
                    self.lru[block] = None

    def touch(self, blocks: list[Block]) -> None:
        """Use `blocks` once more; those that were free leave the queue of evictable ones."""
        for block in blocks:
            if block.users == 0:
                del self.lru[block]
            block.users += 1

    def publish(self, block: Block, key: bytes) -> None:
        """Make a full block findable."""
        block.key = key
        self.index[block.group].setdefault(key, []).append(block)

    def find(self, key: bytes, group: int) -> Block | None:
        """A cached block with this key in `group`; None where there is none."""
        copies = self.index[group].get(key)
        return copies[0] if copies else None

    def _forget(self, block: Block, key: bytes) -> None:
        index = self.index[block.group]
        copies = index[key]
        copies.remove(block)
        if not copies:
            del index[key]
        block.key = None

    def reset(self) -> bool:
        """Forget all hashes; only while no block is in use (as vLLM's /reset_prefix_cache)."""
        if self.free != self.size:
            return False
        self.unhashed, self.lru = self.size, OrderedDict()
        self.index = [{} for _ in self.index]
        return True
