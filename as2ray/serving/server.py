"""Runs the service in the foreground: on a local Ray, or on the cluster of RAY_ADDRESS."""

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
"""Name of the Ray Serve application."""


def run_server(config: ServiceConfig, host: str, port: int) -> None:
    """Serves until the process is interrupted or terminated, then shuts down in order.

    Args:
        config: Models and settings.
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        ConfigError: The port is in use, or this machine has no such address or port.
        ResourceError: The replicas do not fit on the local Ray, which would wait for ever.
    """
    is_local = os.environ.get("RAY_ADDRESS", "local") == "local" and not ray.is_initialized()
    if is_local:  # on a cluster, the proxies listen on its nodes
        _check_address(host, port)
    if config.auth_token_file is None and not _is_loopback(host):
        sys.stderr.write(f"as2ray: others may reach {host}, and requests need no token\n")
    application = build_app(config)
    with ray_session():
        if is_local:  # a cluster may get more nodes
            _check_capacity(config.replicas)
        # Ray's own handler would end Ray's processes first, and then Serve cannot shut down.
        previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            timeout_s = 2 * config.limits.request_timeout_s
            serve.start(http_options={"host": host, "port": port, "request_timeout_s": timeout_s})
            serve.run(application, name=APP_NAME, blocking=True)
        except KeyboardInterrupt:
            sys.stderr.write("as2ray: interrupted\n")
        finally:
            _shut_down()
            signal.signal(signal.SIGTERM, previous_handler)


def _check_address(host: str, port: int) -> None:
    try:
        with socket.socket(socket.getaddrinfo(host, None)[0][0]) as listener:
            # As servers do: a port is free although its last connections are still in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"host {host}, port {port}: {error}",
            fix="choose another --port or --host, or stop the process that listens there",
        ) from error


def _check_capacity(replicas: ReplicasConfig) -> None:
    """Checks that the replicas and gateways fit on the single node of a local Ray."""
    [node] = node_resources()
    count = max(replicas.min_replicas, 1)
    needs = {
        "CPU": count * replicas.num_cpus + replicas.num_gateways * replicas.gateway_num_cpus,
        "GPU": count * replicas.num_gpus,
    }
    if any(need > node.get(name, 0.0) + 1e-9 for name, need in needs.items()):
        raise ResourceError(
            f"{count} replicas and {replicas.num_gateways} gateways need {needs['CPU']:g} CPU and "
            f"{needs['GPU']:g} GPU; this machine has {node.get('CPU', 0):g} CPU and "
            f"{node.get('GPU', 0):g} GPU",
            fix="lower --settings.replicas.num_cpus (fractions are allowed), or serve on a cluster",
        )


def _shut_down() -> None:
    """Ends the application, and Ray Serve with it unless it runs other applications."""
    if serve.status().applications.keys() - {APP_NAME}:
        serve.delete(APP_NAME)
    else:
        serve.shutdown()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
