"""Errors with a code and a sentence. The command line prints the sentence and exits with `exit_status`."""

from __future__ import annotations


class SpocError(Exception):
    """Something the workbench can explain in one sentence.

    code: short, stable, machine-readable (`unknown-cluster`, `port-busy`);
    message: names what is wrong and what to do about it.
    """

    exit_status = 1

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self):  # so that it survives a process pool
        return type(self), (self.code, self.message)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the sentence alone."""
        return [f"{type(self).__name__} [{self.code}]: {self.message}"]


class InputError(SpocError):
    """The user's input is wrong (file, field, parameter, endpoint). Exit status 2, nothing lost."""

    exit_status = 2


class GateError(SpocError):
    """The work ran but a validity gate failed or the answer is negative. Exit status 1."""
