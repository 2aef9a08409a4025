"""Kernel names out of what profilers print, each format as the tool writes it; headings and notices are no kernels."""

from __future__ import annotations

import gzip
import html
import json

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.nsight.namelist import kernel_names

FLASH = ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int, 1, 2>>>(T1::Params)")
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
BOTH = [FLASH, NCCL]
NOTICE = """
NOTICE: Existing SQLite export found: /w/q.sqlite
        It is assumed file was previously exported from: /w/q.nsys-rep
        Consider using --force-export=true if needed.

Processing [/w/q.sqlite] with [/opt/nvidia/reports/cuda_gpu_kern_sum.py]...

 ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):

"""
SUM = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"
CALLS = "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n60.0,6000000,100,60000.0,cudaLaunchKernel\n"
CSV = f'{SUM}\n60.0,6,1,6.0,6.0,5,6,1.0,"{FLASH}"\n40.0,4,5,8.0,8.0,7,8,1.0,"{NCCL}"\n'
REPORTS = (f"Generating SQLite file /tmp/a.sqlite from /tmp/a.nsys-rep\nProcessing [a] with [kern_sum.py]...\n{CSV}\n"
           f"Processing [a] with [api_sum.py]...\n{CALLS}\nProcessing [a] with [nvtx_sum.py]...\n"
           f"Time (%),Total Time (ns),Instances,Style,Range\n60.0,6,1,PushPop,:execute_model\n")
GPU_TRACE = ("Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Device,Strm,Name\n"
             f'0,6,1,132,,NVIDIA H100 (0),7,"{FLASH}"\n9,2,3,,1.5,NVIDIA H100 (0),7,[CUDA memcpy Host-to-Device]\n')
COLUMN = NOTICE + f""" Time (%)  Total Time (ns)  Instances  Avg (ns)  {'Name':^102}
 --------  ---------------  ---------  --------  {'-' * 102}
     65.8    1,119,749,165     18,912   59208.4  {FLASH}
      9.9    3,602,652,081    273,840   13156.0  {NCCL}
"""
BOXED = NOTICE + f"""+----------+-----------+{'-' * 110}+
| Time (%) | Instances |{'Name':^110}|
+----------+-----------+{'-' * 110}+
|     65.8 |    333648 | {FLASH:108} |
|      9.9 |    273840 | {NCCL:108} |
+----------+-----------+{'-' * 110}+

 ** CUDA API Summary (cuda_api_sum):

+----------+-----------+------------------+
| Time (%) | Num Calls |       Name       |
+----------+-----------+------------------+
|     36.3 |   1116364 | cudaLaunchKernel |
+----------+-----------+------------------+
"""
PAGE = ("<html><body><table><tr><th>Time (%)</th><th>Instances</th><th>Name</th></tr>"
        + "".join(f"<tr><td>6</td><td>1</td><td>{html.escape(name)}</td></tr>" for name in BOTH) + "</table></html>")
NCU = ('==PROF== Connected to process 42 (/usr/bin/python3)\n==PROF== Profiling "x": 0%....50%....100% - 9 passes\n'
       '"ID","Process Name","Kernel Name","Context","Block Size","Metric Unit"\n"","","","","",""\n'
       f'"0","python3","{FLASH}","1","(128, 1, 1)","%"\n"1","python3","{NCCL}","1","(128, 1, 1)","%"\n'
       '==PROF== Disconnected from process 42\n')
AVERAGES = f"""{'-' * 40}  {'-' * 12}  {'-' * 12}  {'-' * 12}  {'-' * 12}
{'Name':>40}    Self CPU %      Self CPU     Self CUDA   Self CUDA %
{'-' * 40}  {'-' * 12}  {'-' * 12}  {'-' * 12}  {'-' * 12}
{'aten::mm':>40}         0.10%     293.005us       5.247us         0.90%
{'ProfilerStep*':>40}         0.00%       0.000us      90.247us        90.90%
{'cudaLaunchKernel':>40}         6.33%     197.031us       0.000us         0.00%
{'void flash::flash_fwd_splitkv_kernel<...':>40}         0.00%       0.000us       0.001us         0.00%
{'Memcpy DtoH (Device -> Pinned)':>40}         0.00%       0.000us      39.040us         0.74%
{'-' * 40}  {'-' * 12}  {'-' * 12}  {'-' * 12}  {'-' * 12}
Self CPU time total: 3.111ms
"""
ROWS = [{"Time (%)": 6.0, "Instances": 1, "Name": name} for name in BOTH]
EVENTS = {"schemaVersion": 1, "traceEvents": [
    {"ph": "X", "cat": "kernel", "name": FLASH}, {"ph": "X", "cat": "cpu_op", "name": "aten::mm"},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)"}, {"ph": "M", "name": "process_name"}]}


@pytest.mark.parametrize(("text", "names"), [
    (CSV, BOTH), (REPORTS, BOTH), (CSV.replace("\n", "\r\n"), BOTH), (CSV.replace('"', ""), BOTH),
    (f'Time (%);Instances;Name\n60,0;1;"{FLASH}"\n40,0;4.000;{NCCL}\n', BOTH),
    (f"Time (%)\tInstances\tName\n60.0\t1\t{FLASH}\n40.0\t4\t{NCCL}\n", BOTH),
    (GPU_TRACE, [FLASH, "[CUDA memcpy Host-to-Device]"]), (COLUMN, BOTH), (BOXED, BOTH), (PAGE, BOTH), (NCU, BOTH),
    (AVERAGES, ["void flash::flash_fwd_splitkv_kernel<...", "Memcpy DtoH (Device -> Pinned)"]),
    (NOTICE + json.dumps(ROWS, indent=2), BOTH), (json.dumps(EVENTS), [FLASH, "Memset (Device)"]),
    (f"Count,QCount,API Name,Kernel Name\n5,5,cudaLaunchKernel,{NCCL}\n", [NCCL]),
    (f'"Kind","Kernel_Name","Start_Timestamp"\n"KERNEL_DISPATCH","{FLASH}",1\n', [FLASH]),
    (f"Instances,Category,Operation\n5,CUDA_KERNEL,{NCCL}\n9,CUDA_API,cudaLaunchKernel\n", [NCCL]),
    (f"kernel_name\n{FLASH}\n{NCCL}\n{FLASH}\n", BOTH), (f"Kernel Name\n\n{NCCL}\n", [NCCL]),
    (f'{FLASH}\n\n"{NCCL}"\n[CUDA memset]\n', [*BOTH, "[CUDA memset]"]),
])
def test_the_names_of_the_kernels_and_nothing_else(tmp_path, text, names):
    path = tmp_path / "kernels"
    path.write_bytes(text.encode())
    assert kernel_names(path) == names


@pytest.mark.parametrize("data", [
    b"\xef\xbb\xbf" + CSV.encode(), CSV.encode("utf-16"), b"\xfe\xff" + CSV.encode("utf-16-be"),
    gzip.compress(CSV.encode()), REPORTS.replace("/tmp/a", "C:\\J\xfcrgen").encode("cp1252")])
def test_the_encodings_of_other_systems(tmp_path, data):
    path = tmp_path / "kernels.csv"
    path.write_bytes(data)
    assert kernel_names(path) == BOTH


@pytest.mark.parametrize(("text", "said"), [
    (CALLS, "lists GPU kernels in a column 'Name' or 'Kernel Name'"),
    ("Start (ns),Duration (ns),Name,Result,Pid\n500,300,cudaLaunchKernel,0,42\n", "none of its tables"),
    ('{"nvjet_tst": "gemm"}', "none of its tables"), ("[]", "none of its tables"),
    ("kernel_name,count\nfoo<a, b>(c),3\n", "line 2 has 3 cells under a heading of 2: put a name that holds ','"),
    ("Time,Total\n1,2\n", "line 1, is a table's"), (f"{SUM}\n", "holds no kernel names"),
    (NOTICE, "holds no kernel names"), ("SQLite format 3\0", "is not a text file"),
])
def test_what_holds_no_kernels_is_said(tmp_path, text, said):
    path = tmp_path / "kernels.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r".*") as error:
        kernel_names(path)
    assert said in error.value.message
