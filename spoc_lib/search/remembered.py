"""A script that remembers: every trial of a search plays the same turns, so they are drawn once."""

from __future__ import annotations

from collections.abc import Iterator

from spoc_lib.workload.script import ConversationScript, Turn, UserScript


class RememberedScript:
    """`script` with its turns kept. A user that is told of another history than the one on record (a failed turn,
    a context limit met earlier) is drawn anew from there: the turns are those of the script in every case."""

    def __init__(self, script: ConversationScript) -> None:
        self._script = script
        self.seed, self.salt = script.seed, script.salt
        self._records: dict[int, list[tuple[int, Turn]]] = {}

    def user(self, number: int) -> RememberedUser:
        """User `number`, from memory where it was played before."""
        return RememberedUser(self._script, number, self._records.setdefault(number, []))

    def users(self, count: int) -> Iterator[RememberedUser]:
        """The first `count` users."""
        return (self.user(number) for number in range(count))


class RememberedUser:
    """One user: reads the record while it fits, extends it at its end, leaves it where it does not fit."""

    def __init__(self, script: ConversationScript, number: int, record: list[tuple[int, Turn]]) -> None:
        self._script, self.user = script, number
        self._record, self._place = record, 0
        self._live: UserScript | None = None
        self._recording = True
        self.persona = record[0][1].persona if record else script.user(number).persona

    def next(self, history_tokens: int) -> Turn:
        """See `UserScript.next`."""
        if self._live is None and self._place < len(self._record):
            told, turn = self._record[self._place]
            if told == history_tokens:
                self._place += 1
                return turn
            self._recording = False
        if self._live is None:
            self._live = self._script.user(self.user)
            for told, _ in self._record[: self._place]:
                self._live.next(told)
        turn = self._live.next(history_tokens)
        if self._recording and len(self._record) == self._place:
            self._record.append((history_tokens, turn))
        self._place += 1
        return turn
