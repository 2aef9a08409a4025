"""Personas by name, by path, or as recorded sessions: who asks, wherever a workload is named."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from spoc_lib import config
from spoc_lib.config import Cluster
from spoc_lib.core import yamlfile
from spoc_lib.workload.model.persona import Persona, PersonaSet
from spoc_lib.workload.traces.importers import import_path
from spoc_lib.workload.traces.result import ImportResult

__all__ = ["Persona", "PersonaSet", "RecordedSet", "load_personas", "with_persona_slos"]

#: What stands before the path of recorded sessions where personas are named.
TRACES = "traces:"


class RecordedSet(PersonaSet):
    """Recorded sessions in the place of personas: scripts play the recording, the fields only describe it."""

    _recorded: Any = PrivateAttr(None)

    @property
    def recorded(self) -> ImportResult:
        """The imported sessions."""
        return self._recorded

    @classmethod
    def of(cls, document: dict[str, Any], recorded: ImportResult) -> RecordedSet:
        """A set whose users play `recorded` sessions."""
        described = yamlfile.parse(cls, document, "the recorded sessions")
        described._recorded = recorded
        return described


def with_persona_slos(cluster: Cluster) -> Cluster:
    """The cluster with the SLOs that its personas bring along beside its own."""
    own = getattr(load_personas(cluster.personas), "slos", [])
    return cluster.model_copy(update={"slos": [*cluster.slos, *own]})


def load_personas(name_or_path: str) -> PersonaSet:
    """A persona set by its name in data/personas or by the path of a YAML file; InputError names the faulty field.

    `traces:PATH` gives recorded sessions of any format that `traces.importers` reads.
    """
    if name_or_path.startswith(TRACES):
        from spoc_lib.workload.fitting.persona import describe  # brings scipy.stats, which playing a set does not need

        recorded = import_path(name_or_path.removeprefix(TRACES))
        return RecordedSet.of(describe(recorded), recorded)
    return yamlfile.load(PersonaSet, config.find("personas", name_or_path, "personas"))
