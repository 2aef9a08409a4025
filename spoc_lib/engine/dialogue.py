"""A user's history on the virtual clock: the prompt of each turn as pieces of streams, template included.

The layout is that of `workload.template` (gpt-oss's harmony form), token for token: a message is start, role, message,
content, end; a prompt ends with start, assistant. The reply is generated right behind that, but when it is sent
again a message token stands before it, so cached reply blocks never match the resent history, as on a real server.
A script for another template shows in its prompt_tokens; then the template's tokens are placed by their counts.
"""

from __future__ import annotations

from spoc_lib.engine.scheduling.content import Piece
from spoc_lib.workload.script import SHARED_LAYERS, Turn

#: Streams of the driver's own are negative; scripts use positive ones.
TEMPLATE_STREAM = -1
_SYSTEM_LEAD = Piece(TEMPLATE_STREAM, 0, 3)       # start system message
_NEXT_USER = Piece(TEMPLATE_STREAM, 8, 4)         # end start user message
_FIRST_USER = Piece(TEMPLATE_STREAM, 24, 3)       # start user message
_PROMPT_END = Piece(TEMPLATE_STREAM, 16, 3)       # end start assistant
_REPLY_LEAD = Piece(TEMPLATE_STREAM, 19, 1)       # message
_FILLER_START = 64


def reply_stream(user: int, number: int) -> int:
    """Identity of what the server generates for a user's request `number`."""
    return -(((user + 1) << 32) + number + 2)


class Dialogue:
    """The growing prompt of one user.

    new: pieces that the last `send` added (all of them when it began a context); prompt_tokens: the prompt's length;
    content_tokens: content of the history, replies in, template out (what `UserScript.next` wants);
    aligned: the reply stands in the resent history where it was generated (no template token before it).
    """

    def __init__(self, user: int) -> None:
        self.user = user
        self.content_tokens = 0
        self.prompt_tokens = 0
        self.new: list[Piece] = []
        self.begins = True
        self.aligned = False
        self._requests = 0
        self._reply = (0, 0)  # (stream, tokens) of the last reply, not yet in the prompt

    def send(self, turn: Turn) -> int:
        """Append a turn; returns the stream of its reply."""
        self.begins = turn.starts
        if turn.starts:
            self._begin(turn)
        else:
            self._continue(turn)
        self._requests += 1
        stream = reply_stream(self.user, self._requests)
        self._reply = (stream, 0)
        return stream

    def receive(self, tokens: int) -> None:
        """The reply came with `tokens` tokens (0: the request failed)."""
        self._reply = (self._reply[0], tokens)
        self.content_tokens += tokens

    def _begin(self, turn: Turn) -> None:
        pieces: list[Piece] = []
        content = 0
        shared_open = False
        segments = [*turn.history, *((segment, 0) for segment in turn.append)]
        for number, (segment, reply) in enumerate(segments):
            if number == 0:
                shared_open = segment.layer in SHARED_LAYERS
                pieces.append(_SYSTEM_LEAD if shared_open else _FIRST_USER)
            elif shared_open and segment.layer not in SHARED_LAYERS:
                shared_open = False
                pieces.append(_NEXT_USER)
            pieces.append(Piece(segment.stream, 0, segment.tokens))
            content += segment.tokens + reply
            if reply:
                pieces += [_PROMPT_END, _REPLY_LEAD, Piece(reply_stream(self.user, -2 - number), 0, reply), _NEXT_USER]
        pieces.append(_PROMPT_END)
        if content + sum(piece.tokens for piece in pieces if piece.stream == TEMPLATE_STREAM) != turn.prompt_tokens:
            pieces = [piece for piece in pieces if piece.stream != TEMPLATE_STREAM]
            pieces += self._filler(turn.prompt_tokens - content)
        self.new, self.content_tokens = pieces, content
        self.prompt_tokens = sum(piece.tokens for piece in pieces)
        self.aligned = False

    def _continue(self, turn: Turn) -> None:
        reply = Piece(self._reply[0], 0, self._reply[1])
        appended = [Piece(segment.stream, 0, segment.tokens) for segment in turn.append]
        added = sum(piece.tokens for piece in appended)
        before = self.prompt_tokens
        template = turn.prompt_tokens - before - reply.tokens - added
        if template == 8 and reply.tokens:
            self.new = [_REPLY_LEAD, reply, _NEXT_USER, *appended, _PROMPT_END]
        else:
            lead = self._filler(min(1, template))
            self.new = [*lead, reply, *appended, *self._filler(template - len(lead))]
        self.aligned = template < 1
        self.new = [piece for piece in self.new if piece.tokens]
        self.content_tokens += added
        self.prompt_tokens = before + sum(piece.tokens for piece in self.new)

    def _filler(self, tokens: int) -> list[Piece]:
        return [Piece(TEMPLATE_STREAM, _FILLER_START, tokens)] if tokens > 0 else []
