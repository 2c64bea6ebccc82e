import numpy as np
import pytest

from as2ray.checkpoints.loading import load
from as2ray.errors import CheckpointError
from as2ray.models.weight_interpolation import interpolate_weights


def test_every_weight_moves_a_part_of_the_way(checkpoint):
    paths = [checkpoint("bert", 2, initializer_range=size) for size in (0.2, 0.3)]
    tuned, start = (load(path, device="cpu", dtype="fp32") for path in paths)
    ends = [{n: w.clone() for n, w in r.state_dict().items()} for r in (tuned, start)]
    interpolate_weights(tuned, start.state_dict(), 0.25)
    for name, weights in tuned.state_dict().items():
        expected = 0.75 * ends[0][name] + 0.25 * ends[1][name]
        np.testing.assert_allclose(weights.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(CheckpointError, match="of different kinds"):
        interpolate_weights(tuned, {}, 0.5)
