"""The script that a search plays, from its cluster and profile alone (a search resumes from its folder)."""

from __future__ import annotations

from spoc_lib.config import Cluster, Profile
from spoc_lib.sweep.drivers import ScriptFactory


def script_factory(cluster: Cluster, profile: Profile, seed: int) -> ScriptFactory:
    """`salt -> ConversationScript` of the cluster's personas; the salt changes identities, never sizes."""
    from spoc_lib.workload import build_script, load_personas

    personas = load_personas(cluster.personas)
    return lambda salt: build_script(personas, seed, salt=salt, gap_cap_s=profile.gap_cap_s, start=profile.start,
                                     context_limit=cluster.context_limit())
