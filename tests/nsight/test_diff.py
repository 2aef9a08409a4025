"""Two traces compared, with known answers."""

from __future__ import annotations

import shutil
import sqlite3

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import decompose, diff


def test_a_real_trace_whose_collectives_last_twice_as_long(shared, tmp_path, spoc):
    """Tokens come from the user, for this training run tells none: the exposed part and the kernel's own time."""
    before = shared("data/nsight/two_h100/mfu_2gpu_before.sqlite")
    after = tmp_path / "after.sqlite"
    shutil.copyfile(before, after)
    with sqlite3.connect(after) as database:
        database.execute("""UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = 2 * "end" - start WHERE demangledName IN
                            (SELECT id FROM StringIds WHERE value LIKE 'ncclDevKernel%')""")
    a, b = decompose(before), decompose(after)
    found = diff(a, b, tokens=(1000, 1000))
    assert found.unit == "token" and found.notes == []
    top = found.kernels.iloc[0]
    assert top["name"].startswith("ncclDevKernel_SendRecv") and top.b_s == pytest.approx(2 * top.a_s, rel=1e-9)
    assert found.kernels[found.kernels.delta_s != 0].shape[0] == 1
    by = found.categories.set_index("category")
    assert by.delta_s[["attn", "gemm", "norm"]].abs().max() == 0  # compute hides what is added behind it
    assert by.delta_s.sum() == pytest.approx((b.window_s - a.window_s) / 1000, abs=1e-12)
    assert diff(a, b, tokens=(1000, 2000)).categories.b_s.sum() == pytest.approx(by.b_s.sum() / 2)

    assert "a token" in spoc("diff", before, after, "--tokens", "1000:1000").stdout
    for wrong in ("1000", "0:5", "a:b", "5:inf"):
        assert spoc("diff", before, after, "--tokens", wrong).returncode == 2


def test_a_unit_that_nobody_told_is_refused_not_replaced(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    found = decompose(trace.done())
    assert diff(found, found).unit == "second"
    with pytest.raises(InputError, match="do not both tell tokens: compare by second"):
        diff(found, found, "token")
