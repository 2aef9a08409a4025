"""What a rung's prompts shared with earlier ones, by layer, beside what the server's prefix cache gave back.

A prompt is laid out as common ground (organisation, repository, directory, files), the user's own history, and what is
new in this turn. *Intended*: the tokens that an earlier request of the same rung had sent, which an endless cache would
give back. *Cached*: the `cached_tokens` of the server's usage, laid along the same boundaries, for a prefix cache gives
back a beginning. A cold cache, eviction, whole blocks only, a reply that is not echoed as it was sampled: all this
makes cached less than intended, each in its own layer. More than intended means text of earlier rungs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.load.layers import HISTORY, LAYERS, NEW

#: The chat template is in the cache as well, and is no text of ours: at most so many tokens a request.
TEMPLATE_TOKENS = 256
COLUMNS = ("layer", "prompt_tokens", "intended_tokens", "cached_tokens", "intended_ratio", "cached_ratio")


def reuse_table(planned: Iterable[Mapping[str, Any]], requests: pd.DataFrame) -> pd.DataFrame:
    """One row a layer (COLUMNS) over `requests` whose usage tells cached tokens; empty where none does.

    `planned`: the planned lines of the whole rung, whatever came before `requests` included, with
    `layers.boundaries`.
    Ratios are of the layer's own prompt tokens; NaN for a layer that no prompt has.
    """
    told = requests[requests["cached_tokens"].notna() & requests["prompt_tokens"].notna()]
    cached = dict(zip(told["request"], told["cached_tokens"], strict=True))
    sums = np.zeros((len(LAYERS), 3))
    sent: dict[int, int] = {}
    ground: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    known = False
    for row in sorted(planned, key=lambda row: row["send_s"]):
        if "new_tokens" not in row:
            continue
        known, starts = True, "shared" in row
        talk = (row["user"], row["conversation"])
        shared = ground.setdefault(talk, row.get("shared", []))
        layers = [(layer, tokens, min(tokens, sent.get(stream, 0))) for layer, stream, tokens in shared]
        sent |= {stream: max(tokens, sent.get(stream, 0)) for _, stream, tokens in shared}
        if row["request"] not in cached:
            continue
        common = sum(tokens for _, tokens, _ in layers)
        history = 0 if starts else max(0, row["intended_prompt_tokens"] - common - row["new_tokens"])
        layers += [(HISTORY, history, history), (NEW, row["intended_prompt_tokens"] - common - history, 0)]
        _lay_along(layers, cached[row["request"]], sums)
    if not known or not cached:
        return pd.DataFrame(columns=list(COLUMNS))
    table = pd.DataFrame(sums, columns=list(COLUMNS[1:4]))
    table.insert(0, "layer", LAYERS)
    whole = table["prompt_tokens"].where(table["prompt_tokens"] > 0)
    return table.assign(intended_ratio=table["intended_tokens"] / whole, cached_ratio=table["cached_tokens"] / whole)


def warmed(table: pd.DataFrame, requests: int, cache: str) -> list[str]:
    """A sentence when a rung of so many `requests` that relied on its salt alone (`cache`) found text of an earlier one
    in the cache."""
    more = float(table["cached_tokens"].sum() - table["intended_tokens"].sum())
    whole = float(table["prompt_tokens"].sum())
    if cache != "salt" or not more > TEMPLATE_TOKENS * requests:
        return []
    return [f"the cache was warm: it gave back {more / whole:.0%} of the prompt tokens beyond all that this rung had "
            "sent before; take another salt, empty it (reset), or say that it is meant (warm)"]


def _lay_along(layers: list[tuple[str, int, int]], cached_tokens: float, sums: np.ndarray) -> None:
    """Add one prompt's (layer, tokens, intended tokens) to `sums`, the cached beginning spread along them. What lies
    beyond the first token that no earlier request had sent cannot be intended."""
    left, whole = cached_tokens, True
    for layer, tokens, intended in layers:
        given = min(tokens, max(left, 0.0))
        sums[LAYERS.index(layer)] += tokens, intended if whole else 0, given
        left -= tokens
        whole = whole and intended == tokens
