"""The layers of a prompt, from what everybody shares to what is new: written with each planned request.

A client process imports this; `reuse` reads it afterwards.
"""

from __future__ import annotations

from typing import Any

from spoc_lib.workload.script import SHARED_LAYERS, Turn

HISTORY, NEW = "history", "new"
LAYERS = (*SHARED_LAYERS, HISTORY, NEW)


def boundaries(turn: Turn) -> dict[str, Any]:
    """What `reuse_table` must know of a request, for its line among the planned: `shared` = (layer, stream, tokens) of
    the common ground (only where a conversation starts), `new_tokens` = what this turn appends."""
    fresh = sum(segment.tokens for segment in turn.append)
    if not turn.starts:
        return {"new_tokens": fresh}
    opening = [segment for segment, _ in turn.history] + list(turn.append)
    shared = [(segment.layer, segment.stream, segment.tokens) for segment in opening
              if segment.layer in SHARED_LAYERS]
    return {"shared": shared, "new_tokens": turn.prompt_tokens - sum(tokens for _, _, tokens in shared)}
