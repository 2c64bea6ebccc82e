"""Runs the service in the foreground: on a local Ray, or on the cluster of RAY_ADDRESS."""

import fcntl
import ipaddress
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayActorError

from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import node_resources
from as2ray.errors import ConfigError, ResourceError
from as2ray.serving.chatter import without_chatter
from as2ray.serving.deployment import build_app
from as2ray.serving.metrics import COLLECTION_VARIABLE
from as2ray.serving.settings import ServiceConfig

APP_NAME = "as2ray"
"""Name of the Ray Serve application."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)

OTHER_METRICS_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Environment variables of the ports of Ray's autoscaler and dashboard."""

SERVE_VARIABLES = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_kill_worker_timeout_milliseconds": "1000",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
"""Environment variables of each process of a service.

By the first two a process that hangs is killed after 1 s. Otherwise Ray Serve asks it to end, and
waits, and Ray waits 5 s more; its cores are not free for another one until then. Without the third,
each request changes threads several times in proxy and gateway, which takes a sixth of their time.
By the last two Serve's processes send requests to each other by gRPC instead of as Ray's tasks,
which takes a fifth less time, and messages are as large as `max_body_bytes` allows, not 4 MB.
"""

DRAIN_POLL_S, MIN_QUIET_S = 0.2, 1.0
"""Seconds between two counts of requests, and seconds without a new one before the end."""


def run_server(config: ServiceConfig, host: str, port: int) -> None:
    """Serves until the process is interrupted or terminated, then shuts down in order.

    Accepted requests are answered first; a second interrupt ends the service at once.

    Args:
        config: Models and settings.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one of this machine.

    Raises:
        ConfigError: The port is in use, this machine has no such address or port, or it is 0 on a
            cluster, whose nodes would listen on different ports.
        ResourceError: The replicas do not fit on the local Ray, which would wait for ever.
    """
    is_local = os.environ.get("RAY_ADDRESS", "local") == "local" and not ray.is_initialized()
    if _is_loopback(host) and not config.allowed_hosts:
        config = config.model_copy(update={"allowed_hosts": LOOPBACK_NAMES})
    if config.auth_token_file is None and not _is_loopback(host):
        sys.stderr.write(f"as2ray: others may reach {host}, and requests need no token\n")
    with ExitStack() as stack:
        stack.enter_context(without_chatter())
        if is_local:  # on a cluster, the proxies listen on its nodes
            port = port or _check_address(host, 0)
            stack.enter_context(_lock_address(host, port))
            _check_address(host, port)
            stack.enter_context(_ray_environment(host))
        elif port == 0:
            raise ConfigError(
                "port 0: each node of a cluster would listen on another port", fix="give a --port"
            )
        application = build_app(config)
        stack.enter_context(_restored_signals())
        stack.enter_context(ray_session())
        if is_local:  # a cluster may get more nodes
            _check_capacity(config)
        # Ray's own handler would end Ray's processes first, and then Serve cannot shut down.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            _serve(application, host, port, config)
        except KeyboardInterrupt:
            sys.stderr.write("as2ray: stopped at once by a second interrupt\n")
            _ignore_signals()
            sys.stderr.flush()
            if is_local:
                # Ray's processes end with this one. After `ray.shutdown()` the threads of Serve's
                # handle would end it with an error.
                os._exit(0)
            _shut_down()
        finally:
            _ignore_signals()


def _serve(application: serve.Application, host: str, port: int, config: ServiceConfig) -> None:
    """Serves until the first interrupt, then answers what has been accepted."""
    outcome = ""
    try:
        timeout_s = 2 * config.limits.request_timeout_s
        serve.start(
            http_options={"host": host, "port": port, "request_timeout_s": timeout_s},
            # Without colors, and without a line for each client that leaves.
            logging_config={"encoding": "JSON", "log_level": "WARNING"},
        )
        serve.run(application, name=APP_NAME, blocking=True)
    except KeyboardInterrupt:
        outcome = _drain(config.drain_timeout_s)
    except RayActorError as error:
        _shut_down()
        raise ResourceError(
            f"a process of Ray Serve ended before the service was ready ({type(error).__name__})",
            fix="start it again when the machine is less busy",
        ) from error
    except BaseException:
        _shut_down()
        raise
    _shut_down()
    sys.stderr.write(f"as2ray: stopped{outcome}\n")


def _drain(timeout_s: float) -> str:
    """Lets the gateways accept nothing more, and waits until they have answered everything.

    Serve breaks requests in flight when it shuts down, so the gateways count them. Says so if there
    are any.

    Returns:
        What to add to the line about the end: why requests are without an answer, or "".
    """
    deadline, num_ongoing, is_ready = time.monotonic() + timeout_s, -1, False
    try:
        gateways = serve.get_app_handle(APP_NAME)
        # By default it wants an event loop here if the shell has set `SERVE_VARIABLES`.
        gateways._init(_run_router_in_separate_loop=True)
        gateways.broadcast("drain").results(timeout_s=timeout_s)
        is_ready = True
        num_received = quiet_s = 0.0
        # The proxies may still be sending a request, or a response.
        while (num_ongoing or quiet_s < MIN_QUIET_S) and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
            counts = gateways.broadcast("count_requests").results(timeout_s=timeout_s)
            is_first = num_ongoing < 0
            num_ongoing, previous = sum(count for count, _ in counts), num_received
            if is_first and num_ongoing:
                sys.stderr.write(f"as2ray: interrupted; requests to answer first: {num_ongoing}\n")
            num_received = sum(count for _, count in counts)
            quiet_s = quiet_s + DRAIN_POLL_S if num_received == previous else 0.0
    except Exception as error:
        name = type(error).__name__
        if not is_ready:  # it was interrupted before a gateway had started
            return f" before it was ready ({name})"
        known = f"; requests without an answer by then: {num_ongoing}" if num_ongoing > 0 else ""
        return f"; a gateway failed ({name}){known}"
    if num_ongoing > 0:
        return f"; requests without an answer after {timeout_s:g} s: {num_ongoing}"
    return ""


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restores the handlers of both interrupts at the end of the context."""
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _ray_environment(host: str) -> Iterator[None]:
    """Sets environment variables that the processes of a local Ray read when they start."""
    variables = {
        # Three checks of 5 s would end the proxy before it has started on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "as2ray.serving.proxy:create_middlewares",
        # The proxy would take the address of a client on this machine from `x-forwarded-for`.
        "FORWARDED_ALLOW_IPS": "",
        **SERVE_VARIABLES,
    }
    if not sys.stderr.isatty():
        variables["RAY_COLOR_PREFIX"] = "0"
    if _is_loopback(host):  # Ray's ports of metrics listen on all addresses and need no token
        variables[COLLECTION_VARIABLE] = "0"
        # Where there is no such port, Ray's autoscaler and dashboard go on without one.
        variables |= dict.fromkeys(OTHER_METRICS_PORTS, "99999")
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: previous[name] or value for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]


@contextmanager
def _lock_address(host: str, port: int) -> Iterator[None]:
    """Keeps other services of this user from an address before the proxy listens on it."""
    path = Path(tempfile.gettempdir()) / f"as2ray-{os.getuid()}-{host}-{port}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"host {host}, port {port}: another `as2ray serve` uses it ({path}: {error})",
            fix="choose another --port or --host, or stop the other one",
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _check_address(host: str, port: int) -> int:
    """Returns the port, or a free one for 0."""
    try:
        with socket.socket(socket.getaddrinfo(host, None)[0][0]) as listener:
            # As the proxy does: a port is free although its last connections are in TIME_WAIT.
            # Unlike the proxy it does not set SO_REUSEPORT, so that no port is shared.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            return int(listener.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"host {host}, port {port}: {error}",
            fix="choose another --port or --host, or stop the process that listens there",
        ) from error


def _check_capacity(config: ServiceConfig) -> None:
    """Checks that the replicas and gateways fit on the single node of a local Ray."""
    [node] = node_resources()
    replicas = config.replicas
    count = max(replicas.min_replicas, 1) if config.models else 0
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
