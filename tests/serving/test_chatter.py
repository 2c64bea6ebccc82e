import logging
import sys

from as2ray.serving.chatter import LOGGERS, without_chatter

TASK = "(raylet) Task ServeController.listen_for_change failed. There are infinite retries"


def test_chatter_of_ray_is_hidden_and_all_else_is_shown(capsys):
    logger = logging.getLogger(LOGGERS[0])
    handler, level = logging.StreamHandler(sys.stderr), logger.level  # made before, as Ray's
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with without_chatter():
        sys.stderr.write(f"{TASK}\n(ServeReplica:as2ray:ranker pid=1) ERROR no memory\n")
        logger.info('Started Serve in namespace "serve".')
        logger.info("Application 'as2ray' is ready at http://127.0.0.1:8000/.")
        sys.stderr.write("no end")
        sys.stdout.write(f"{TASK}\nmore\n")  # where Ray writes it
    sys.stderr.write(f"{TASK}\n")
    logger.info("Connecting to existing Serve app")
    logger.removeHandler(handler)
    logger.setLevel(level)
    printed = capsys.readouterr()
    assert printed.out == "more\n"
    assert printed.err.splitlines() == [
        "(ServeReplica:as2ray:ranker pid=1) ERROR no memory",
        "Application 'as2ray' is ready at http://127.0.0.1:8000/.",
        f"no end{TASK}",
        "Connecting to existing Serve app",
    ]
