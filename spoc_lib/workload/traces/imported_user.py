"""One user who plays recorded sessions (see `imported.ImportedScript`)."""

from __future__ import annotations

from spoc_lib.workload.identity import mix
from spoc_lib.workload.model.plan import MIN_APPEND_TOKENS, MIN_SESSION_TOKENS
from spoc_lib.workload.script import NEVER_S, SHARED_LAYERS, Kind, Segment, Turn
from spoc_lib.workload.template import overhead_tokens
from spoc_lib.workload.traces.recording import Recording, appends, cut, text_segment
from spoc_lib.workload.traces.sessions import Request


class ImportedUser:
    """The turns of one user of an `ImportedScript` (`script.UserScript`)."""

    def __init__(self, script: Recording, number: int) -> None:
        self.persona, self.user = "imported", number
        self.context_limit_hits = 0
        self._script = script
        self._conversation, self._k, self._messages = -1, 0, 0
        self._session, self._copy = 0, 0

    def next(self, history_tokens: int) -> Turn:
        """The next turn (see `script.UserScript`)."""
        script = self._script
        if self._conversation < 0 and script.start == "stationary":
            found = script.found(self.user)
            if found is not None:
                return self._found(*found)
        requests = script.sessions[self._session].requests
        if self._conversation < 0 or self._k >= len(requests):
            return self._new_conversation()
        k, request = self._k, requests[self._k]
        if not appends(requests[k - 1], request, (self._session, k - 1)):
            return self._open(k, "human" if request.human else "agent")
        segments = self._appended(k, request, history_tokens)
        prompt = history_tokens + sum(s.tokens for s in segments) + overhead_tokens(self._messages + 2)
        if script.context_limit is not None and prompt + request.output_tokens > script.context_limit:
            self.context_limit_hits += 1
            return self._new_conversation()
        self._k += 1
        self._messages += 2
        return Turn(self.persona, self.user, self._conversation, k, "human" if request.human else "agent", False,
                    segments, prompt, request.output_tokens, script.gap_s(self._session, k))

    def _appended(self, k: int, request: Request, history_tokens: int) -> tuple[Segment, ...]:
        if request.messages:
            return tuple(text_segment(self._script, m.text, m.tokens, m.layer) for m in request.messages)
        wanted = request.prompt_tokens - history_tokens - overhead_tokens(self._messages + 2)
        stream = mix(self._script.seed, self._script.salt, 75, self.user, self._conversation, k)
        return (Segment(stream, max(MIN_APPEND_TOKENS, wanted), "turn"),)

    def _new_conversation(self) -> Turn:
        script = self._script
        self._conversation += 1
        if script.timing == "timestamps" and (self._conversation > 0 or self.user >= len(script.main)):
            return self._over()
        self._session, self._copy = script.choose(self.user, self._conversation)
        return self._open(0, "start")

    def _open(self, k: int, kind: Kind) -> Turn:
        """A turn that begins a context."""
        script = self._script
        append, output = self._begin(k)
        prompt = sum(segment.tokens for segment in append) + overhead_tokens(self._messages)
        timed = script.timing == "timestamps" and k == 0
        gap = script.start_s(self._session) if timed else script.gap_s(self._session, k)
        return Turn(self.persona, self.user, self._conversation, k, kind, True, append, prompt, output, gap)

    def _begin(self, k: int) -> tuple[tuple[Segment, ...], int]:
        """(segments, output) of a request that begins a context. A prompt beyond the limit is cut to it, so that the
        session is still played."""
        script = self._script
        output, limit = script.sessions[self._session].requests[k].output_tokens, script.context_limit
        append = script.opening((self._session, k), self._copy)
        if limit is not None:
            output = min(output, max(1, limit // 4))
            most = limit - output - overhead_tokens(2)
            if sum(segment.tokens for segment in append) > most:
                self.context_limit_hits += 1
                append = cut(append, most)
        sides = {segment.layer in SHARED_LAYERS for segment in append}
        self._messages, self._k = len(sides), k + 1
        return append, output

    def _found(self, session: int, k: int, left_s: float) -> Turn:
        """The first turn of a user met in mid-session, before request `k`."""
        script = self._script
        self._conversation = 0
        self._session, self._copy = session, mix(self.user, 1) >> 20
        requests = script.sessions[session].requests
        base = script.context_of((session, k))[1]
        append, output = self._begin(base)
        history: list[tuple[Segment, int]] = []
        held = 0
        for j in range(base + 1, k + 1):
            history += [(segment, 0) for segment in append[:-1]] + [(append[-1], output)]
            held += sum(segment.tokens for segment in append) + output
            append, output = self._appended(j, requests[j], held), requests[j].output_tokens
            self._messages += 2
        self._k = k + 1
        prompt = held + sum(segment.tokens for segment in append) + overhead_tokens(self._messages)
        if script.context_limit is not None and prompt + output > script.context_limit:
            return self._new_conversation()
        return Turn(self.persona, self.user, 0, k, "human" if requests[k].human else "agent", True, append, prompt,
                    output, left_s, tuple(history))

    def _over(self) -> Turn:
        """What a user gets whose session is over: a turn that is never due."""
        segment = Segment(mix(self._script.seed, self._script.salt, 76, self.user, self._conversation),
                          MIN_SESSION_TOKENS, "session")
        return Turn(self.persona, self.user, self._conversation, 0, "start", True, (segment,),
                    MIN_SESSION_TOKENS + overhead_tokens(1), 1, NEVER_S)
