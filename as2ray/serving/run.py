"""Serve in the foreground: on a Ray of its own, or on the cluster of RAY_ADDRESS.

Knows Ray. Must not know what is served.
"""

import ipaddress
import signal
import sys

from ray import serve

from as2ray.distributed.cluster import connected
from as2ray.serving.deployment import build
from as2ray.serving.settings import Served

NAME = "as2ray"
"""Of the application."""


def run(args: Served, host: str, port: int) -> None:
    """Serves until it is interrupted or terminated; ends in order either way.

    Args:
        args: What is served.
        host: Address to listen on.
        port: Port to listen on.
    """
    if args.token_file is None and not _is_loopback(host):
        sys.stderr.write(f"as2ray: {host} may be reached by others, and no token is asked\n")
    application = build(args)
    with connected():
        # Ray's own handler ends its processes first, and then nothing can end in order.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            serve.start(
                http_options={
                    "host": host,
                    "port": port,
                    "request_timeout_s": 2 * args.limits.seconds,
                }
            )
            serve.run(application, name=NAME, blocking=True)
        except KeyboardInterrupt:
            sys.stderr.write("as2ray: interrupted\n")
        finally:
            _end()
            signal.signal(signal.SIGTERM, before)


def _end() -> None:
    """Ends our application, and Serve with it unless others' run on the same cluster."""
    if serve.status().applications.keys() - {NAME}:
        serve.delete(NAME)
    else:
        serve.shutdown()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
