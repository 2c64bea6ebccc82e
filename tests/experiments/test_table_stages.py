"""Stages of candidates tables."""

import pytest
import tiny

from as2ray.errors import As2rayError
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.tables import PreparedTable


def test_table_with_other_counts_than_published_needs_verify_false(complete, tmp_path):
    tiny.write_wikiqa(tmp_path, "test", 0, 7)
    spec = {"corpus": "wikiqa", "split": "test", "question_filter": "no_all_negative"}
    with pytest.raises(As2rayError, match="verify: false"):
        complete(PreparedTable(TableSpec(**spec), data_dir=str(tmp_path)))
    outputs, _ = complete(PreparedTable(TableSpec(**spec, verify=False), data_dir=str(tmp_path)))
    assert outputs["verified"] is False
    assert outputs["counts"]["num_questions"] == 7
