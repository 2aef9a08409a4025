"""Kernel names that vLLM, SGLang, TensorRT-LLM and the libraries below them launch, and the category each must have;
none of them stands in the recorded truth list."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from spoc_lib.nsight import CATEGORIES, classify

with open(Path(__file__).parent / "kernel_names.tsv", encoding="utf-8", newline="") as file:
    NAMES = {row["name"]: row["category"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_name_has_its_category(category):
    names = [name for name, wanted in NAMES.items() if wanted == category]
    assert len(names) > 20
    assert {name: got for name, got in classify(names).items() if got != category} == {}
