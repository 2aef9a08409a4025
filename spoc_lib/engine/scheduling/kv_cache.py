"""The paged KV cache of vLLM V1: one pool of blocks, one or more groups of layers, prefix caching.

Rules, each held to recordings of the real engine:

- One block is reserved as the null block, so usage = 1 - free / (num_blocks - 1). A cached but unused block is free.
- The free queue is a count of unhashed blocks, used first, and behind them the hashed ones in the order in which they
  were freed. Taking a hashed block drops its hash. A request's blocks are freed group by group, each in reverse, so
  the tail of a prefix goes before its root.
- Full blocks become findable when they are allocated for a scheduled chunk, as far as their tokens are known;
  output blocks of asynchronous steps when the output is applied.
- Equal blocks computed twice are both kept; a look-up returns the copy inserted first.
- A hit ends at most one token before the end, in whole blocks. A full-attention group needs every block from the
  start; a sliding group needs ceil((window - 1) / block) blocks in a row at the end, or a shorter run that starts at
  block 0. Several groups: the longest hit that all can serve (a fixed point; one pass for one full + one other).
- Blocks behind a sliding window are freed at the request's next allocation, before counting:
  floor((computed - in flight - window + 1) / block) of them.
- Retention interval 0: a sliding group keeps hashed only the window's tail at the prompt's last token and at the
  junction, where a longer hit of another group ended. None: every block; n > 0: also a tail every n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from spoc_lib.engine.scheduling.block_pool import Block, BlockPool
from spoc_lib.engine.scheduling.request import Request, Status

UNTRACKED = -1  # num_hashed of a request that holds no block of the group yet


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix look-up: blocks by group (None = null block), tokens, and the junction (0 = none)."""

    blocks: list[list[Block | None]]
    tokens: int
    junction: int


class KVCache:
    """Blocks of all requests.

    windows: sliding window of each group in order, 0 = full attention;
    in_flight_tokens: most tokens scheduled and not applied (batched tokens × concurrent batches);
    retention: the flag prefix_cache_retention_interval.
    """

    def __init__(self, *, num_blocks: int, block_size: int, windows: list[int], caching: bool, max_model_len: int,
                 in_flight_tokens: int, watermark: float = 0.0, retention: int | None = 0) -> None:
        self.block_size = block_size
        self.windows = windows
        self.max_model_len = max_model_len
        self.retention = retention
        self.watermark_blocks = int(watermark * num_blocks)
        self.pool = BlockPool(num_blocks, len(windows), caching)
        #: blocks that a hit of the group needs in a row
        self._need = [ceil_div(window - 1, block_size) if window else 0 for window in windows]
        #: most blocks that a request of the group holds, which is what admission must find
        self._cap = [ceil_div(min(window - 1 + in_flight_tokens, max_model_len), block_size) + 1 if window else None
                     for window in windows]
        kinds: dict[int, list[int]] = {}
        for group, window in enumerate(windows):
            kinds.setdefault(window, []).append(group)
        self._kinds = sorted(kinds.items(), key=lambda kind: kind[0] != 0)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.free / self.pool.size if self.pool.size else 0.0

    # look-up

    def look_up(self, request: Request) -> Hit:
        """The longest cached prefix of `request` that every group can serve."""
        if not self.pool.caching:
            return Hit([[] for _ in self.windows], 0, 0)
        found: list[list[Block | None]] = [[] for _ in self.windows]
        full_hit: int | None = None
        longest = 0
        length = request.num_tokens - 1
        while True:
            current = length
            for window, groups in self._kinds:
                if window == 0 and full_hit is not None:
                    current = min(current, full_hit)
                    continue
                search = self._sliding_hit if window else self._full_hit
                runs = search(request, current // self.block_size, groups)
                for group, run in zip(groups, runs, strict=True):
                    found[group] = run
                current = len(runs[0]) * self.block_size
                if window == 0:
                    full_hit = current
                longest = max(longest, current)
            if current >= length:
                break
            length = current
            if len(self._kinds) == 2 and self._kinds[0][0] == 0:
                break
        for group, window in enumerate(self.windows):
            if window == 0:
                del found[group][length // self.block_size:]
        hit = length if any(found) else 0
        return Hit(found, hit, longest if longest > hit else 0)

    def _full_hit(self, request: Request, most: int, groups: list[int]) -> list[list[Block | None]]:
        find, key = self.pool.find, request.content.key
        runs: list[list[Block | None]] = [[] for _ in groups]
        for index in range(most):
            blocks = [find(key(index), group) for group in groups]
            if None in blocks:
                break
            for run, block in zip(runs, blocks, strict=True):
                run.append(block)
        return runs

    def _sliding_hit(self, request: Request, most: int, groups: list[int]) -> list[list[Block | None]]:
        find, key = self.pool.find, request.content.key
        need = self._need[groups[0]]
        runs: list[list[Block | None]] = [[None] * most for _ in groups]
        contiguous = 0
        for index in range(most - 1, -1, -1):
            blocks = [find(key(index), group) for group in groups]
            if None in blocks:
                contiguous = 0
                continue
            for run, block in zip(runs, blocks, strict=True):
                run[index] = block
            contiguous += 1
            if contiguous >= need:
                for run in runs:
                    del run[index + contiguous:]
                return runs
        for run in runs:
            del run[contiguous:]
        return runs

    # allocation

    def _skipped_blocks(self, group: int, computed: int) -> int:
        window = self.windows[group]
        return max(0, computed - window + 1) // self.block_size if window else 0

    def _wanted(self, request: Request, tokens: int, computed: int, hit: Hit | None, capped: bool) -> int:
        """Blocks that must be free so that `request` can hold `tokens` tokens."""
        total = 0
        for group, held in enumerate(request.blocks):
            required = ceil_div(tokens, self.block_size)
            cap = self._cap[group]
            if capped and cap is not None:
                required = min(required, cap)
            if request.num_hashed[group] != UNTRACKED:
                total += max(required - len(held), 0)
                continue
            cached = hit.blocks[group] if hit else []
            skipped = self._skipped_blocks(group, computed)
            total += max(required - max(skipped, len(cached) + len(held)), 0)
            in_window = cached[max(0, skipped - len(held)):]
            total += sum(block is not None and block.users == 0 for block in in_window)
        return total

    def allocate(self, request: Request, new_tokens: int, hit: Hit | None = None, *, whole_prompt: bool = False,
                 watermark: bool = False) -> bool:
        """Give `request` slots for `new_tokens` more tokens; False (and nothing taken) when blocks lack.

        hit: the prefix found for a request that is being admitted;
        whole_prompt: all its tokens so far must fit, not only this chunk (scheduler_reserve_full_isl);
        watermark: keep that many blocks free beyond the need (admission while something runs).
        """
        pool = self.pool
        if not request.blocks:
            request.blocks = [[] for _ in self.windows]
            request.num_hashed = [UNTRACKED] * len(self.windows)
        reserve = self.watermark_blocks if watermark and request.status != Status.RUNNING else 0
        computed = min(request.num_computed + (hit.tokens if hit else 0), self.max_model_len)
        if whole_prompt:
            tokens = min(request.num_tokens, self.max_model_len)
            if self._wanted(request, tokens, computed, hit, capped=True) + reserve > pool.free:
                return False
        slots = min(computed + new_tokens, self.max_model_len)
        self._slide(request, max(0, computed - request.num_in_flight))
        if self._wanted(request, slots, computed, hit, capped=False) + reserve > pool.free:
            return False
        if hit and any(hit.blocks):
            self._adopt(request, hit, computed)
        required = ceil_div(slots, self.block_size)
        for group, held in enumerate(request.blocks):
            if required > len(held):
                held.extend(pool.take(required - len(held), group))
        self.publish(request, min(computed + new_tokens, request.num_tokens))
        return True

    def _adopt(self, request: Request, hit: Hit, computed: int) -> None:
        for group, cached in enumerate(hit.blocks):
            skipped = self._skipped_blocks(group, computed)
            kept = cached[skipped:]
            self.pool.touch([block for block in kept if block is not None])
            request.blocks[group] = [None] * skipped + kept
            request.num_hashed[group] = len(request.blocks[group])

    def _slide(self, request: Request, computed: int) -> None:
        """Free the blocks that no later token attends to."""
        for group, held in enumerate(request.blocks):
            skipped = min(self._skipped_blocks(group, computed), len(held))
            freed: list[Block] = []
            for index in range(skipped - 1, -1, -1):
                block = held[index]
                if block is None:
                    break
                freed.append(block)
                held[index] = None
            self.pool.release(freed)

    # hashing and freeing

    def publish(self, request: Request, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable."""
        if not self.pool.caching or not request.blocks:
            return
        full = tokens // self.block_size
        for group, held in enumerate(request.blocks):
            first = max(request.num_hashed[group], 0)
            if full <= first:
                continue
            for index in range(first, full):
                block = held[index]
                if block is not None and self._retained(request, group, index):
                    self.pool.publish(block, request.content.key(index))
            request.num_hashed[group] = full

    def _retained(self, request: Request, group: int, index: int) -> bool:
        """Whether the retention rule keeps block `index` of a sliding group findable."""
        if self.retention is None or not self.windows[group]:
            return True
        need = self._need[group]
        if self.retention:
            period = self.retention // self.block_size
            if index % period >= period - need:
                return True
        for boundary in (request.num_prompt - 1, request.junction):
            end = boundary // self.block_size
            if end - need <= index < end:
                return True
        return False

    def free(self, request: Request) -> None:
        """Return all blocks of `request`, group by group, each from its tail."""
        for held in request.blocks:
            self.pool.release(held[::-1])
        request.blocks, request.num_hashed = [], []
