import json

import pytest

from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.errors import CheckpointError
from benchmarks import epoch


@pytest.mark.slow
def test_simulated_ranks_report_decoded_rows_and_speed(tmp_path):
    try:
        packaged_minilm()
    except CheckpointError as error:
        pytest.skip(error.problem)
    output = tmp_path / "epoch.json"
    folders = ["--data", str(tmp_path / "nowhere"), "--folder", str(tmp_path)]
    epoch.main(["--small", "--ranks", "1,3", *folders, "--output", str(output)])
    report = json.loads(output.read_text())
    one, three = report["results"]["ranks"]
    assert [one["ranks"], three["ranks"]] == [1, 3]
    assert one["decoded_per_used"] == 1
    # Rank 2 reads the second of two shards with rank 1, and that one the first with rank 0.
    assert three["decoded_per_used"] == 2
    assert min(one["pairs_per_cpu_s"], three["pairs_per_cpu_s"]) > 0
    assert [claim["holds"] for claim in report["claims"]][:2] == [True, False]
