import pytest

from as2ray.distributed.index import build_sharded
from as2ray.errors import CorpusError, ResourceError
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.sentence_index import SentenceIndex


@pytest.mark.slow
def test_index_built_by_tasks_is_the_one_built_here(tmp_path, ray_local):
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(6):
        lines = [f"Word{k % 5} and word{k % (number + 2)} here." for k in range(20)]
        (documents / f"{number}.txt").write_text("\n\n".join(lines))
    here = write_index(documents, tmp_path / "here")
    there = build_sharded(documents, tmp_path / "there", num_shards=3, cpus_per_shard=0.5)
    assert there["fingerprint"] == here["fingerprint"]
    one, other = (SentenceIndex.open(tmp_path / name) for name in ("here", "there"))
    for question in ("word1", "word3 here", "word0 word4"):
        assert one.search(question, 100) == other.search(question, 100)
    with pytest.raises(ResourceError, match="99 CPU per shard"):
        build_sharded(documents, tmp_path / "no", cpus_per_shard=99)
    (documents / "bad.jsonl").write_text('{"body": "x"}')
    with pytest.raises(CorpusError, match="without"):
        build_sharded(documents, tmp_path / "no", num_shards=2, cpus_per_shard=0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents", "here", "there"]
