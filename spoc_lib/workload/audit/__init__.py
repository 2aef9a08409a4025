"""The audit of a workload: what a script really asks for beside what its personas intend, and what prompts share."""

from spoc_lib.workload.audit.gates import Gate
from spoc_lib.workload.audit.report import Audit, audit, sessions_table

__all__ = ["Audit", "Gate", "audit", "sessions_table"]
