"""A study lies in the folder that was asked for, whatever its name holds, and is found there again."""

from __future__ import annotations

import optuna
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.search.storage import file_url, open_storage


@pytest.mark.parametrize("name", [
    "what?", "{x}{", "50% off%7B", "a#b", "with space", "it's", 'say "x"', "a:b", "\u00fcml\u00e4ut \u6f22",
    "$HOME&c=d", "back\\slash\nnew line", "file:x?mode=ro"])
def test_a_study_lies_where_it_was_asked_for(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    for trials in (1, 2):
        study = optuna.create_study(storage=open_storage(file_url(folder / "study.db")), study_name="s",
                                    load_if_exists=True)
        study.add_trial(optuna.trial.create_trial(value=1.0))
        assert len(study.trials) == trials
    assert (folder / "study.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]


def test_a_broken_study_is_named_by_its_path(tmp_path):
    folder = tmp_path / "50% {x}?"
    folder.mkdir()
    (folder / "study.db").write_text("no database, and long enough to be told from one" * 40)
    with pytest.raises(InputError) as caught:
        open_storage(file_url(folder / "study.db"))
    assert f"remove {folder / 'study.db'}, and its trials" in caught.value.message
