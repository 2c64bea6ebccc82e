"""Serve in the foreground: on a Ray of its own, or on the cluster of RAY_ADDRESS.

Knows Ray. Must not know what is served.
"""

import ipaddress
import os
import signal
import socket
import sys

import ray
from ray import serve

from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import node_resources
from as2ray.errors import ConfigError, ResourceError
from as2ray.serving.deployment import build_app
from as2ray.serving.settings import ReplicasConfig, ServiceConfig

APP_NAME = "as2ray"
"""Of the application."""


def run_server(config: ServiceConfig, host: str, port: int) -> None:
    """Serves until it is interrupted or terminated; ends in order either way.

    Args:
        args: What is served.
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        RecipeError: The port is taken, or there is no such host or port here.
        ResourceError: Replicas that a Ray of its own has no room for: it would wait for ever.
    """
    own = os.environ.get("RAY_ADDRESS", "local") == "local" and not ray.is_initialized()
    if own:  # on a cluster, proxies listen on its machines
        _check_address(host, port)
    if config.auth_token_file is None and not _is_loopback(host):
        sys.stderr.write(f"as2ray: {host} may be reached by others, and no token is asked\n")
    application = build_app(config)
    with ray_session():
        if own:  # to a cluster, nodes may come
            _check_capacity(config.replicas)
        # Ray's own handler ends its processes first, and then nothing can end in order.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            serve.start(
                http_options={
                    "host": host,
                    "port": port,
                    "request_timeout_s": 2 * config.limits.request_timeout_s,
                }
            )
            serve.run(application, name=APP_NAME, blocking=True)
        except KeyboardInterrupt:
            sys.stderr.write("as2ray: interrupted\n")
        finally:
            _shut_down()
            signal.signal(signal.SIGTERM, before)


def _check_address(host: str, port: int) -> None:
    try:
        with socket.socket(socket.getaddrinfo(host, None)[0][0]) as listener:
            # As servers do: a port whose last connections are not forgotten yet is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"host {host}, port {port}: {error}"
            "; expected an address of this machine and a free port",
            fix="choose another --port or --host, or end what listens there",
        ) from error


def _check_capacity(replicas: ReplicasConfig) -> None:
    """Refuses what does not fit on the one node of a Ray of our own."""
    [node] = node_resources()
    count = max(replicas.min_replicas, 1)
    needs = {
        "CPU": count * replicas.num_cpus + replicas.num_gateways * replicas.gateway_num_cpus,
        "GPU": count * replicas.num_gpus,
    }
    if any(need > node.get(name, 0.0) + 1e-9 for name, need in needs.items()):
        raise ResourceError(
            f"{count} replicas and {replicas.num_gateways} gateways: {needs['CPU']:g} CPU, "
            f"{needs['GPU']:g} GPU"
            f"; expected at most {node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU (what "
            "this machine has)",
            fix="lower --settings.replicas.cpus (fractions are allowed), or serve on a cluster",
        )


def _shut_down() -> None:
    """Ends our application, and Serve with it unless others' run on the same cluster."""
    if serve.status().applications.keys() - {APP_NAME}:
        serve.delete(APP_NAME)
    else:
        serve.shutdown()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
