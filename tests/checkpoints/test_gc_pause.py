import gc

import pytest

from as2ray.checkpoints.gc_pause import gc_paused


@pytest.mark.parametrize("was_enabled", [False, True])
def test_garbage_collection_is_paused_and_left_as_it_was(was_enabled):
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
