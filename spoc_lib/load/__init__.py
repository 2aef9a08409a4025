"""Real Locust users against any OpenAI-compatible endpoint, every request accounted for.

    plan = LoadPlan(base_url="http://127.0.0.1:8000", model="m", users=20, duration_s=60)
    result = run(plan, folder)          # LoadRun: summary, requests, chunks, metrics, window

Locust patches the interpreter when it is imported, so it lives in a child process only (`load.child`). The child
must patch before anything else is imported, therefore the names below are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"LoadPlan": "plan", "FixedTurns": "plan", "LoadRun": "runner", "run": "runner", "read_run": "runner",
          "selfcheck": "clientcheck", "SelfCheck": "clientcheck"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
