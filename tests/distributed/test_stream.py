"""A table that is read as training reads it, by workers that only count."""

import logging

import pytest

from as2ray.cli.main import main
from as2ray.distributed import stream as module
from as2ray.distributed.stream import StreamConfig, stream
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer

TWO = WorkersConfig(num_workers=2, cpus_per_worker=0.1, num_data_cpus=1.8)


@pytest.fixture
def config(corpus, checkpoint):
    return StreamConfig(str(corpus), str(checkpoint()), epochs=2)


@pytest.mark.slow
def test_workers_count_all_pairs_and_tokens_of_each_epoch(
    config, corpus, ray_local, caplog, monkeypatch
):
    monkeypatch.setattr(module, "REPORT_S", 0.5)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        reports = stream(config, TWO)
    rows = ParquetTable.open(corpus).to_table()
    tokenizer = PairTokenizer.from_folder(config.tokenizer, max_length=128)
    tokens = tokenizer.encode(rows["question"].to_pylist(), rows["candidate"].to_pylist())
    assert [r.counts.num_pairs for r in reports] == [rows.num_rows] * 2
    assert [r.counts.num_tokens for r in reports] == [int(tokens.lengths.sum())] * 2
    for report in reports:
        assert len(report.stats) == 2
        assert all("MapBatches(_pack_windows)" in stats for stats in report.stats)
        assert report.spilled_bytes == 0
        assert 0 < report.counts.wait_s < 2 * report.duration_s
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1].startswith(f"epoch 2: {rows.num_rows:,} of {rows.num_rows:,} pairs, ")
    assert len(lines) > 2


def test_workers_that_do_not_fit_are_refused(config, ray_local):
    with pytest.raises(ResourceError, match="the plan needs"):
        stream(config, WorkersConfig(num_workers=2, num_data_cpus=64))


@pytest.mark.slow
def test_command_tells_rates_and_the_hours_of_a_model(corpus, ray_local, capsys):
    main(["stream", "--table", str(corpus), "--workers", "1", "--model_pairs_per_second", "0.1"])
    out = capsys.readouterr().out
    assert "400 pairs and " in out
    assert "MapBatches(_pack_windows)" in out
    limit = "1.11 hours on 1 devices that train on 0.1 pairs/s each: the model limits it"
    assert limit in out
