"""A search read back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json
from spoc_lib.search.settings import open_settings


def read_result(folder: Path) -> dict[str, Any]:
    """`StudyResult.to_dict()` of a finished search; InputError when there is none or it has not finished."""
    open_settings(folder)
    path = Path(folder) / "result.json"
    if not path.is_file():
        raise InputError("unfinished-search", f"the search in {folder} has not finished: go on with it by "
                         f"`spoc search resume {folder}`")
    return read_json(path, "search result")
