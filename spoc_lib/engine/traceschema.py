"""Tables of Nsight Systems' SQLite export (schema 3.25) that a simulated trace fills; names and types are theirs."""

from __future__ import annotations

import sqlite3

_I, _T, _N = "INTEGER", "TEXT", "INTEGER NOT NULL"

_KERNEL_REQUIRED = ("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
                    "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId")
_KERNEL_OPTIONAL = ("sharedMemoryExecuted", "graphNodeId", "sharedMemoryLimitConfig", "qmdBulkReleaseDone",
                    "qmdPreexitDone", "qmdLastCtaDone", "graphId", "clusterX", "clusterY", "clusterZ",
                    "clusterSchedulingPolicy", "maxPotentialClusterSize", "maxActiveClusters",
                    "sharedMemoryRequestedPercentage", "tensorSizeMinusOneElements")

TABLES: dict[str, dict[str, str]] = {
    "StringIds": {"id": "INTEGER NOT NULL PRIMARY KEY", "value": "TEXT NOT NULL"},
    "PROCESSES": {"globalPid": _I, "pid": _I, "name": _T},
    "META_DATA_EXPORT": {"name": "TEXT NOT NULL", "value": _T},
    "META_DATA_CAPTURE": {"name": "TEXT NOT NULL", "value": _T},
    "TARGET_INFO_SESSION_START_TIME": {"utcEpochNs": _I, "utcTime": _T, "localTime": _T, "systemClockNs": _I},
    "TARGET_INFO_GPU": {"vmId": _N, "id": _N, "name": _T, "totalMemory": _I, "memoryBandwidth": _I,
                        "computeMajor": _I, "computeMinor": _I},
    "NVTX_EVENTS": {
        "start": _N, "end": _I, "eventType": _N, "rangeId": _I, "category": _I, "color": _I, "text": _T,
        "globalTid": _I, "endGlobalTid": _I, "textId": _I, "domainId": _I, "uint64Value": _I, "int64Value": _I,
        "doubleValue": "REAL", "uint32Value": _I, "int32Value": _I, "floatValue": "REAL", "jsonTextId": _I,
        "jsonText": _T, "binaryData": _T},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {
        "start": _N, "end": _N, "eventClass": _N, "globalTid": _I, "correlationId": _I, "nameId": _N,
        "returnValue": _N, "callchainId": _I},
    "CUPTI_ACTIVITY_KIND_KERNEL": {
        "start": _N, "end": _N, "deviceId": _N, "contextId": _N, "greenContextId": _I, "streamId": _N,
        "correlationId": _I, "globalPid": _I, "demangledName": _N, "shortName": _N, "mangledName": _I,
        "launchType": _I, "cacheConfig": _I, **dict.fromkeys(_KERNEL_REQUIRED, _N),
        **dict.fromkeys(_KERNEL_OPTIONAL, _I)},
}


def create_tables(database: sqlite3.Connection) -> None:
    """Create all tables, empty."""
    for table, columns in TABLES.items():
        body = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        database.execute(f"CREATE TABLE {table} ({body})")
