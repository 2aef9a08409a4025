"""`--range`: NVTX ranges laid on the GPU through the launches, whoever opened and closed them."""

from __future__ import annotations

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import decompose

PID = (1 << 48) | (100 << 24)
THREAD, OTHER = PID | 5, PID | 9
DDL = """
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER,
  endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);"""


@pytest.fixture
def trace(new_trace, kernel_names):
    """Kernel n runs from 1000 n + 500 for 100 ns and was launched at 1000 n; kernel 7 by another thread."""
    trace = new_trace()
    trace.database.executescript(f"DROP TABLE NVTX_EVENTS; {DDL}")
    for n in range(10):
        trace.insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=1000 * n, end=1000 * n + 1, correlationId=n + 1,
                     globalTid=OTHER if n == 7 else THREAD, nameId=trace.string("cudaLaunchKernel"))
        trace.kernel(kernel_names["gemm"], 1000 * n + 500, 1000 * n + 600, correlation=n + 1)
    return trace


def opened(trace, text, start, end, kind=59, **more):
    trace.insert("NVTX_EVENTS", start=start, end=end, eventType=kind, text=text, globalTid=more.pop("thread", THREAD),
                 **more)


@pytest.mark.parametrize("text", ["steady", "a*b [x]", "%", "50_%"])
def test_the_window_is_that_of_the_kernels_launched_in_the_range(trace, text):
    opened(trace, text, 1_900, 7_100)  # holds launches 2 to 7, and 7 is another thread's
    found = decompose(trace.done(), nvtx_range=text)
    assert found.window_ns == (2_500, 6_600) and not any("range" in note and "host" in note for note in found.notes)


def test_a_start_end_range_holds_what_any_thread_of_its_process_launches(trace):
    opened(trace, "steady", 1_900, 7_100, kind=60, endGlobalTid=OTHER)
    opened(trace, "steady", 0, 9_000, thread=((1 << 48) | (300 << 24) | 5))  # another process' range of the name
    assert decompose(trace.done(), nvtx_range="steady").window_ns == (2_500, 7_600)


def test_registered_names_and_ranges_nested_in_themselves(trace):
    for start, end in ((1_900, 5_100), (2_900, 4_100)):
        opened(trace, None, start, end, textId=trace.string("steady"))
    found = decompose(trace.done(), nvtx_range="steady")
    assert found.window_ns == (2_500, 5_600) and any(note.startswith("2 ranges are named") for note in found.notes)


def test_a_range_of_a_domain_is_named_with_it(trace):
    for domain, name, start in ((1, "left", 900), (2, "right", 4_900)):
        opened(trace, name, 0, None, kind=75, domainId=domain)
        opened(trace, "work", start, start + 1_200, domainId=domain)
    path = trace.done()
    assert decompose(path, nvtx_range="work@right").window_ns == (5_500, 6_600)
    assert decompose(path, nvtx_range="work").window_ns == (1_500, 6_600)
    with pytest.raises(InputError, match="no NVTX range named 'left'"):
        decompose(path, nvtx_range="left")  # a domain's name is no range


def test_a_range_that_never_ended_is_said(trace):
    opened(trace, "steady", 1_900, None)
    path = trace.done()
    with pytest.raises(InputError, match=r"'steady' never ended .*--window 0\.000002:0\.000010"):
        decompose(path, nvtx_range="steady")


def test_one_of_two_that_never_ended_is_left_out(trace):
    opened(trace, "steady", 1_900, 3_100)
    opened(trace, "steady", 6_900, None)
    found = decompose(trace.done(), nvtx_range="steady")
    assert found.window_ns == (2_500, 3_600) and any("1 of 2 ranges" in note for note in found.notes)


def test_names_that_are_not_there_get_near_ones(trace):
    for text in ("steady state", "warmup", "cub::DeviceRadixSort"):
        opened(trace, text, 0, 10)
    path = trace.done()
    with pytest.raises(InputError, match="near it: 'steady state'"):
        decompose(path, nvtx_range="stead")
    with pytest.raises(InputError, match="there are 3 other names"):
        decompose(path, nvtx_range="zzzzzz")


def test_without_launches_the_hosts_time_is_used_and_said(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 10_000)
    trace.nvtx("steady", 1_000, 3_000)
    found = decompose(trace.done(), nvtx_range="steady")
    assert found.window_ns == (1_000, 3_000) and any("holds no launches" in note for note in found.notes)


def test_a_range_in_which_nobody_launches_is_the_hosts_time(trace):
    opened(trace, "client", 1_900, 4_100, thread=(1 << 48) | (300 << 24) | 5)
    found = decompose(trace.done(), nvtx_range="client")
    assert found.window_ns == (1_900, 4_100) and any("no kernel was launched in it" in note for note in found.notes)


def test_libraries_ranges_are_no_steps(trace):
    for n in range(10):
        opened(trace, "cub::DeviceRadixSort", 1000 * n - 50, 1000 * n + 50)
        opened(trace, "ncclAllReduce", 1000 * n - 50, 1000 * n + 50, domainId=1)
    assert decompose(trace.done()).steps.empty
