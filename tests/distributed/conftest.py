"""One local Ray for the tests of a process, as small as it goes."""

import pytest


@pytest.fixture(scope="session")
def ray_local():
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            logging_level="ERROR",
        )
    yield
    ray.shutdown()
