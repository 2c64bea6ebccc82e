"""Where runs under Ray Train keep their checkpoints; `tests/cluster` trains."""

import shutil

from ray.train import Checkpoint

from as2ray.distributed.train import open_checkpoint, run_name


def test_runs_on_one_storage_have_each_their_name_and_keep_it(tmp_path):
    # A pipeline's runs are all called alike, and Ray resumes whatever has the name.
    folders = [tmp_path / "rankers" / f"step-seed{n}.part" / "run" for n in range(2)]
    names = [run_name(folder, tmp_path / "storage") for folder in folders]
    assert len(set(names)) == 2
    assert names == [run_name(folder, tmp_path / "storage") for folder in folders]
    assert all(name.startswith(f"step-seed{n}-") for n, name in enumerate(names))
    # What was thrown away is not gone on with.
    shutil.rmtree(folders[0])
    assert run_name(folders[0], tmp_path / "storage") not in names


def test_checkpoint_is_read_where_it_lies_or_as_a_copy_that_goes(tmp_path):
    (tmp_path / "weights").write_text("here")
    with open_checkpoint(Checkpoint.from_directory(str(tmp_path))) as folder:
        assert (folder / "weights").read_text() == "here"
    with open_checkpoint(None) as folder:
        assert folder is None


def test_run_in_its_own_folder_has_the_folder_s_name(tmp_path):
    assert run_name(tmp_path / "x.part" / "run", tmp_path / "x.part") == "run"
