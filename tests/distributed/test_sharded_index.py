import os
import time

import pytest
import ray

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.distributed.index import build_sharded, map_on_actors
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import CheckpointError, CorpusError, ResourceError
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.sentence_index import SentenceIndex


@pytest.mark.slow
def test_index_built_by_tasks_is_the_one_built_here(tmp_path, ray_local, sentence_encoder):
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(6):
        lines = [f"Word{k % 5} and word{k % (number + 2)} here." for k in range(20)]
        (documents / f"{number}.txt").write_text("\n\n".join(lines))
    config, options = IndexConfig(encoder=sentence_encoder), {"load_encoder": load_sentence_encoder}
    here = write_index(documents, tmp_path / "here", config, **options)
    options |= {"num_shards": 3, "cpus_per_shard": 0.5}
    there = build_sharded(documents, tmp_path / "there", config, **options)
    assert there["fingerprint"] == here["fingerprint"]
    one, other = (
        SentenceIndex.open(tmp_path / name, load_sentence_encoder) for name in ("here", "there")
    )
    for question in ("word1", "word3 here", "word0 word4"):
        assert one.search(question, 100) == other.search(question, 100)
        candidates, others = (i.search_candidates(question, 120) for i in (one, other))
        assert [c.similarity for c in others] == pytest.approx(
            [c.similarity for c in candidates], abs=1e-4
        )
    with pytest.raises(ResourceError, match="99 CPU per shard"):
        build_sharded(documents, tmp_path / "no", cpus_per_shard=99)
    (documents / "bad.jsonl").write_text('{"body": "x"}')
    with pytest.raises(CorpusError, match="without"):
        build_sharded(documents, tmp_path / "no", num_shards=2, cpus_per_shard=0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents", "here", "there"]


@pytest.mark.slow
def test_actors_give_results_in_order_survive_a_crash_and_stop_with_their_caller(
    tmp_path, ray_local
):
    workers, read = WorkersConfig(num_workers=2, cpus_per_worker=0.5), []

    def create():
        def square(number):
            if number == 3 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os._exit(1)
            time.sleep(0.1 * (number % 2))
            (tmp_path / str(number)).touch()
            return number * number

        return square

    def arguments():
        for number in range(1000):
            read.append(number)
            yield number

    def refuse():
        raise CheckpointError("no model here", fix="give another")

    results = map_on_actors(create, arguments(), workers)
    assert [next(results) for _ in range(20)] == [number**2 for number in range(20)]
    assert (tmp_path / "died").exists()
    results.close()
    time.sleep(1)
    assert len(read) <= 25
    assert len(list(tmp_path.iterdir())) <= 26
    with pytest.raises(CheckpointError, match="no model here") as error:
        list(map_on_actors(refuse, [1, 2], workers))
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < until, f"actors hold CPUs after {error}"
        time.sleep(0.1)
