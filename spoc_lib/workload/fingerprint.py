"""The hash of a script: two scripts with one hash play the same conversations."""

from __future__ import annotations

import hashlib
from dataclasses import astuple

from spoc_lib.workload.script import ConversationScript

#: Users and turns of a script that its hash covers. Personas are dealt out by their shares, so one with a share of 2 %
#: is among them.
USERS, TURNS = 64, 3


def script_sha256(script: ConversationScript) -> str:
    """Of the first turns of the first users: what they append, ask for and wait, were every reply as long as asked."""
    digest = hashlib.sha256()
    for number in range(USERS):
        user, history = script.user(number), 0
        for _ in range(TURNS):
            turn = user.next(history)
            digest.update(repr(astuple(turn)).encode())
            earlier = sum(segment.tokens + reply for segment, reply in turn.history)
            history = (0 if turn.starts else history) + earlier + sum(s.tokens for s in turn.append)
            history += turn.output_tokens
    return digest.hexdigest()
