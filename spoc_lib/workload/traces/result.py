"""What an import found: sessions, what was left out and why, and the script that plays them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spoc_lib.workload.traces.imported import ImportedScript
from spoc_lib.workload.traces.sessions import Session


@dataclass(frozen=True)
class ImportResult:
    """What an import found.

    sessions, skipped [(record, reason)], formats {name: sessions}; sub-agents' sessions are among `all_sessions` and
    counted apart. own_history_reuse: of the prompt tokens of all requests but a session's first, the part that earlier
    prompts of the same session held (with their replies, where the source has their text), in whole blocks.
    notes: sentences on what was lost, by kind with its count, and on how the source was read.
    """

    all_sessions: tuple[Session, ...]
    skipped: tuple[tuple[str, str], ...]
    sources: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = ()

    @property
    def sessions(self) -> int:
        """Sessions of people; sub-agents' are not counted."""
        return len(self.main_sessions)

    @property
    def main_sessions(self) -> list[Session]:
        """Those that no other session started."""
        return [session for session in self.all_sessions if session.parent is None]

    @property
    def turns(self) -> int:
        """Requests of the sessions, sub-agents' not among them."""
        return sum(len(session.requests) for session in self.main_sessions)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all these requests together."""
        return sum(request.prompt_tokens for session in self.main_sessions for request in session.requests)

    @property
    def own_history_reuse(self) -> float:
        """Share of later prompts' tokens that stood in the session's own prompt before; NaN of none."""
        later = [request for session in self.main_sessions for request in session.requests
                 if request.own_tokens is not None]
        prompt = sum(request.prompt_tokens for request in later)
        return sum(request.own_tokens or 0 for request in later) / prompt if prompt else float("nan")

    def script(self, seed: int = 0, *, salt: int = 0, gap_cap_s: float = 60.0, context_limit: int | None = None,
               start: str = "cold", timing: str = "closed") -> ImportedScript:
        """The sessions as a script that both drivers play (see `imported.ImportedScript`)."""
        return ImportedScript(self.all_sessions, seed, salt, gap_cap_s, context_limit, start, timing)

    def to_dict(self) -> dict[str, Any]:
        """Keys of `spoc workload import`."""
        formats: dict[str, int] = {}
        for session in self.main_sessions:
            formats[session.format] = formats.get(session.format, 0) + 1
        agents = [session for session in self.all_sessions if session.parent is not None]
        requests = [request for session in self.main_sessions for request in session.requests]
        everything = self.tokens
        return {
            "sessions": self.sessions, "turns": self.turns, "tokens": everything, "skipped":
            [{"record": record, "reason": reason} for record, reason in self.skipped],
            "own_history_reuse": self.own_history_reuse, "formats": formats,
            "output_tokens": sum(request.output_tokens for request in requests),
            "reuse_with_first_prompts": sum(r.own_tokens or 0 for r in requests) / everything if everything else None,
            "known_gaps_ratio": _ratio(sum(r.gap_s is not None for r in requests), len(requests) - self.sessions),
            "subagent_sessions": len(agents), "subagent_turns": sum(len(session.requests) for session in agents),
            "sources": list(self.sources), "notes": list(self.notes),
        }


def _ratio(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None
