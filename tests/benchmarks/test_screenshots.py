"""The screenshots of the docs: what is started, what is shown, and how large the pictures are."""

import io
import shutil
import socket
import urllib.request

import numpy as np
import pytest
from PIL import Image

from benchmarks import screenshots


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_pictures_lose_colors_until_they_are_small():
    plain = np.full((900, 1200, 3), 255, np.uint8)
    plain[:300] = (20, 90, 160)
    kept = Image.open(io.BytesIO(screenshots.compress(png(plain)))).convert("RGB")
    assert (np.asarray(kept) == plain).all()
    noise = np.random.default_rng(0).integers(0, 255, (300, 1200, 3), dtype=np.uint8)
    small = screenshots.compress(png(noise))
    assert len(small) < len(png(noise)) / 4
    assert Image.open(io.BytesIO(small)).size == (1200, 300)


def test_folder_without_anything_to_show_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        screenshots.main([str(tmp_path), "--images", str(tmp_path / "images")])
    assert "has no run and no search" in capsys.readouterr().err


@pytest.mark.slow
def test_tensorboard_is_started_shown_and_ended(tmp_path, capsys):
    pytest.importorskip("selenium", reason="selenium is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    if None in (shutil.which("chromium"), shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver on this machine")
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(20):
            writer.add_scalar("loss", 1 / (step + 1), step)
    screenshots.main([str(tmp_path), "--images", str(tmp_path / "images")])
    picture = tmp_path / "images" / "tensorboard.png"
    assert picture.stat().st_size < screenshots.MAX_BYTES
    image = Image.open(picture)
    assert image.width == screenshots.WIDTH
    colors = image.convert("RGB").getcolors(1 << 20)
    assert len(colors) > 30  # a page that is drawn has text, lines and icons
    url = capsys.readouterr().out.split()[-1]
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_program_that_is_not_installed_is_named_with_the_fix():
    with (
        pytest.raises(SystemExit, match=r"no-such-program .*as2ray\[tracking\]"),
        screenshots.server("no-such-program") as url,
    ):
        urllib.request.urlopen(url)
