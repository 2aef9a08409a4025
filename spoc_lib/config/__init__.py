"""What a user may write down: clusters with their SLOs, models, GPUs, profiles. Schemas, loading by name or path, no
defaults hidden in code that a file could state."""

from spoc_lib.config.cluster import (
    Cluster,
    Engine,
    Hardware,
    LadderSpec,
    SearchSpec,
    TelemetryEndpoints,
    load_cluster,
    price_per_gpu_hour,
)
from spoc_lib.config.flags import FlagValue, read_flags
from spoc_lib.config.profile import Profile, load_profile
from spoc_lib.config.shipped import data_dir, find, is_path, names
from spoc_lib.config.slo import SHARES, Slo, slo_name
from spoc_lib.config.specs import GpuSpec, ModelSpec, MoeShape, load_gpu, load_model

__all__ = ["SHARES", "Cluster", "Engine", "FlagValue", "GpuSpec", "Hardware", "LadderSpec", "ModelSpec", "MoeShape",
           "Profile", "SearchSpec", "Slo", "TelemetryEndpoints", "data_dir", "find", "is_path", "load_cluster",
           "load_gpu", "load_model", "load_profile", "names", "price_per_gpu_hour", "read_flags", "slo_name"]
