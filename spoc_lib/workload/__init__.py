"""WHO asks WHAT: personas, common ground, conversation scripts, corpus, tokenizers, the audit, foreign traces.

Names are imported when they are first asked for: a server that only needs the template or the tokenizer starts without
the distributions' mathematics.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spoc_lib.workload.build import Script, build_script
    from spoc_lib.workload.model.persona import Persona, PersonaSet
    from spoc_lib.workload.personas import load_personas
    from spoc_lib.workload.script import ConversationScript, Segment, Turn, UserScript

__all__ = ["ConversationScript", "Persona", "PersonaSet", "Script", "Segment", "Turn", "UserScript", "build_script",
           "load_personas"]

_HOMES = {"Script": "build", "build_script": "build", "Persona": "model.persona", "PersonaSet": "model.persona",
          "load_personas": "personas", "ConversationScript": "script", "Segment": "script", "Turn": "script",
          "UserScript": "script"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
