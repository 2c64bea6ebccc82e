import logging
import sys

import pytest

from as2ray.serving.chatter import LOGGERS, without_chatter


def test_chatter_of_ray_is_hidden_and_all_else_is_shown(caplog):
    logger = logging.getLogger(LOGGERS[0])
    logger.addHandler(caplog.handler)  # Ray's do not propagate
    caplog.set_level(logging.INFO, LOGGERS[0])
    with without_chatter():
        logger.info('Started Serve in namespace "serve".')
        logger.info("Application 'as2ray' is ready at http://127.0.0.1:8000/.")
    logger.info("Connecting to existing Serve app")
    logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {
        "Application 'as2ray' is ready at http://127.0.0.1:8000/.",
        "Connecting to existing Serve app",
    }


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_of_other_processes_about_the_end_and_clients_that_leave_are_hidden(capsys, stream):
    with without_chatter():
        output = getattr(sys, stream)
        output.write("(gateway) Cancelling request that has already been assigned to a replica.\n")
        output.write(
            "(raylet) Task ServeController.f failed. The actor was killed by `ray.kill`.\n"
        )
        output.write("(raylet) Task ServeController.f failed. The node died.\n")
        output.write("(gateway pid=7) a warning\n")
        output.write("an end")
    assert "".join(capsys.readouterr()) == (
        "(raylet) Task ServeController.f failed. The node died.\n(gateway pid=7) a warning\nan end"
    )
