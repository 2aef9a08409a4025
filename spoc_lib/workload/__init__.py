"""WHO asks WHAT: personas, common ground, conversation scripts, corpus, tokenizers, the audit, foreign traces."""

from spoc_lib.workload.build import Script, build_script
from spoc_lib.workload.personas import Persona, PersonaSet, load_personas
from spoc_lib.workload.script import ConversationScript, Segment, Turn, UserScript

__all__ = ["ConversationScript", "Persona", "PersonaSet", "Script", "Segment", "Turn", "UserScript", "build_script",
           "load_personas"]
