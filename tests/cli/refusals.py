"""What commands refuse."""

import pytest

from as2ray.cli.main import main


def refused(capsys, *arguments: object) -> str:
    """What a command that ends in order, by an error of the user's, tells."""
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in arguments])
    assert stopped.value.code == 2
    error_text = capsys.readouterr().err
    assert "Traceback" not in error_text
    return error_text
