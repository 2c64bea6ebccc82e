"""The files that a platform team deploys, against Ray's own schema and ours."""

import inspect
import os
import re
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

import as2ray
from as2ray.distributed.plan import check_capacity
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.serving import deployment, metrics, proxy
from as2ray.serving.middleware import PUBLIC_PATHS
from as2ray.serving.server import SERVE_VARIABLES
from as2ray.serving.settings import ServiceConfig

KUBERNETES = "1.33"
"""Version of Kubernetes whose schema the files must have."""

KUBERAY_FIELDS = {
    "RayService": {"serveConfigV2", "upgradeStrategy", "rayClusterConfig"},
    "RayJob": {
        *("entrypoint", "runtimeEnvYAML", "backoffLimit", "shutdownAfterJobFinishes"),
        *("ttlSecondsAfterFinished", "rayClusterSpec"),
    },
    "RayCluster": {
        *("rayVersion", "enableInTreeAutoscaling", "authOptions", "gcsFaultToleranceOptions"),
        *("headGroupSpec", "workerGroupSpecs"),
    },
    "group": {"rayStartParams", "template"},
    "workers": {"groupName", "replicas", "minReplicas", "maxReplicas"},
}
"""Fields of KubeRay's resources (ray.io/v1) that the files use; a typo is none of them."""

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "serve_configs"
VERSION = as2ray.__version__
RAY = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M).group(1)


def config(name: str) -> dict:
    found = yaml.safe_load((CONFIGS / name).read_text())
    if found.get("kind") == "RayService":
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    return found


@pytest.mark.parametrize("name", ["laptop.yaml", "gpu_cluster.yaml", "rayservice.yaml"])
def test_serve_config_is_ray_s_and_its_arguments_are_ours(name):
    schema = ServeDeploySchema.model_validate(config(name))
    [application] = schema.applications
    assert application.import_path == f"{deployment.__name__}:{deployment.build_app.__name__}"
    args = ServiceConfig.model_validate(application.args)
    assert {one.name for one in application.deployments} <= {"ranker", "gateway"}
    for one in application.deployments:
        assert one.user_config == {"models": args.models}
    assert schema.http_options.request_timeout_s >= args.limits.request_timeout_s
    # What others reach asks for a token.
    assert args.allowed_hosts if schema.http_options.host == "127.0.0.1" else args.auth_token_file
    # Serve's own errors take the form of ours.
    text = (CONFIGS / name).read_text()
    assert f"{proxy.__name__}:{proxy.create_middlewares.__name__}" in text
    # What hangs is killed at once, and requests do not change threads.
    for variable, value in SERVE_VARIABLES.items():
        assert f"{variable}={value}" in text or f'name: {variable}, value: "{value}"' in text
    assert proxy.create_middlewares()


def test_the_builder_takes_typed_arguments_and_names_its_deployments(tmp_path):
    [parameter] = inspect.signature(deployment.build_app).parameters.values()
    assert parameter.annotation is ServiceConfig
    (tmp_path / "tokens").write_text("one\n")
    (tmp_path / "tokens").chmod(0o600)
    args = config("gpu_cluster.yaml")["applications"][0]["args"]
    args["auth_token_file"] = str(tmp_path / "tokens")
    args["limits"]["request_timeout_s"] = 60
    application = deployment.build_app(ServiceConfig.model_validate(args))
    gateway = application._bound_deployment
    ranker = gateway.init_args[0]._bound_deployment
    assert (gateway.name, ranker.name) == ("gateway", "ranker")
    assert ranker.user_config == gateway.user_config == {"models": args["models"]}
    assert ranker.max_queued_requests == gateway.max_queued_requests == 256
    scaling = ranker._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 8)
    assert ranker.ray_actor_options["num_gpus"] == 1
    # A gateway that goes answers first what it has; a ranker that hangs keeps its cores no longer.
    assert gateway._deployment_config.graceful_shutdown_timeout_s > 60
    assert ranker._deployment_config.graceful_shutdown_timeout_s < 5
    # Three misses, of which the first begins a period after it hangs, leave it half of 20 s.
    for options in (gateway._deployment_config, ranker._deployment_config):
        assert options.health_check_period_s + 3 * options.health_check_timeout_s <= 10


def test_a_pod_that_ends_answers_what_it_has_and_its_user_alone_reads_the_tokens():
    spec = yaml.safe_load((CONFIGS / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    args = ServiceConfig.model_validate(config("rayservice.yaml")["applications"][0]["args"])
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        [mode] = [v["secret"]["defaultMode"] for v in pod["volumes"] if "secret" in v]
        assert mode == 0o440
        assert pod["securityContext"]["fsGroup"]
    [container] = pod["containers"]
    [_, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert args.limits.request_timeout_s < int(seconds) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["rayservice.yaml", "rayjob.yaml"])
def test_kubernetes_files_name_the_versions_that_are_pinned(name):
    found = yaml.safe_load((CONFIGS / name).read_text())
    assert found["apiVersion"] == "ray.io/v1"
    spec = found["spec"].get("rayClusterConfig") or found["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == RAY
    assert spec["authOptions"] == {"mode": "token"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == f"as2ray:{VERSION}"
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


def pod_of(group: dict, namespace: str = "default") -> dict:
    """A Pod with the template of a group of pods, to compare with Kubernetes' own schema."""
    template = group["template"]
    metadata = {"name": "ray", "namespace": namespace, **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("name", ["rayservice.yaml", "rayjob.yaml"])
def test_pods_and_fields_of_kuberay_have_the_types_of_kubernetes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="extra `development`")
    resource = yaml.safe_load((CONFIGS / name).read_text())
    spec = resource["spec"].get("rayClusterConfig") or resource["spec"]["rayClusterSpec"]
    assert resource["spec"].keys() <= KUBERAY_FIELDS[resource["kind"]]
    assert spec.keys() <= KUBERAY_FIELDS["RayCluster"]
    assert spec["headGroupSpec"].keys() <= KUBERAY_FIELDS["group"]
    for group in spec["workerGroupSpecs"]:
        assert group.keys() <= KUBERAY_FIELDS["group"] | KUBERAY_FIELDS["workers"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        kubernetes_validate.validate(pod_of(group), KUBERNETES, strict=True)
        assert {type(value) for value in group["rayStartParams"].values()} <= {str}
    credential = spec.get("gcsFaultToleranceOptions", {}).get("redisPassword")
    variable = {"name": "x", **credential} if credential else {"name": "x", "value": ""}
    pod = pod_of(spec["headGroupSpec"])
    [container] = pod["spec"]["containers"]
    pod["spec"] = {"containers": [{**container, "env": [variable]}]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.skipif("AS2RAY_CRDS" not in os.environ, reason="no folder of KubeRay's CRDs")
@pytest.mark.parametrize("name", ["rayservice.yaml", "rayjob.yaml"])
def test_kuberay_file_has_the_schema_of_its_custom_resource(name):
    jsonschema = pytest.importorskip("jsonschema")
    resource = yaml.safe_load((CONFIGS / name).read_text())
    crd = Path(os.environ["AS2RAY_CRDS"]) / f"ray.io_{resource['kind'].lower()}s.yaml"
    versions = yaml.safe_load(crd.read_text())["spec"]["versions"]
    [schema] = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1"]
    jsonschema.validate(resource, schema)


def test_ingress_passes_what_the_service_takes_and_a_canary_is_another_service():
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="extra `development`")
    args = ServiceConfig.model_validate(config("rayservice.yaml")["applications"][0]["args"])
    name = yaml.safe_load((CONFIGS / "rayservice.yaml").read_text())["metadata"]["name"]
    stable, canary = yaml.safe_load_all((CONFIGS / "ingress.yaml").read_text())
    for ingress, service in ((stable, name), (canary, f"{name}-canary")):
        kubernetes_validate.validate(ingress, KUBERNETES, strict=True)
        [rule] = ingress["spec"]["rules"]
        [path] = rule["http"]["paths"]
        backend = path["backend"]["service"]
        assert backend == {"name": f"{service}-serve-svc", "port": {"number": 8000}}
        assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]
        given = ingress["metadata"]["annotations"]
        assert int(given["nginx.ingress.kubernetes.io/proxy-body-size"]) == (
            args.limits.max_body_bytes
        )
        timeout_s = int(given["nginx.ingress.kubernetes.io/proxy-read-timeout"])
        assert timeout_s >= args.limits.request_timeout_s
    assert given["nginx.ingress.kubernetes.io/canary"] == "true"


def test_pod_monitor_finds_the_pods_and_alerts_use_metrics_that_the_service_has():
    promql = pytest.importorskip("promql_parser")
    monitor, rules = yaml.safe_load_all((CONFIGS / "monitoring.yaml").read_text())
    spec = yaml.safe_load((CONFIGS / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        [container] = group["template"]["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
    plotted = set(re.findall(r"\bray_[a-z0-9_]+", (CONFIGS / "grafana.json").read_text()))
    [group] = rules["spec"]["groups"]
    for rule in group["rules"]:
        promql.parse(rule["expr"])
        used = set(re.findall(r"\bray_[a-z0-9_]+", rule["expr"]))
        assert used, rule
        assert used <= plotted  # tests/serving/test_metrics.py finds these in a running service
        assert rule["annotations"].keys() == {"summary", "description"}


def test_pods_of_the_service_run_without_privileges_and_are_ready_when_it_is():
    spec = yaml.safe_load((CONFIGS / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    probe, ports = container["readinessProbe"]["httpGet"], container["ports"]
    assert probe["path"] in PUBLIC_PATHS  # probes have no token
    assert {"name": probe["port"], "containerPort": 8000} in ports
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert spec["gcsFaultToleranceOptions"]["redisAddress"]


def test_rayservice_may_grow_to_its_replicas_and_every_pod_sees_the_tokens():
    spec = yaml.safe_load((CONFIGS / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    args = ServiceConfig.model_validate(config("rayservice.yaml")["applications"][0]["args"])
    assert spec["enableInTreeAutoscaling"]
    [gpus] = spec["workerGroupSpecs"]
    assert gpus["minReplicas"] < gpus["maxReplicas"] == args.replicas.max_replicas
    for group in (spec["headGroupSpec"], gpus):  # the head builds the application
        [container] = group["template"]["spec"]["containers"]
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(Path(args.auth_token_file).parent) in mounted


def test_rayjob_runs_a_pipeline_with_a_recipe_that_are_there():
    spec = yaml.safe_load((CONFIGS / "rayjob.yaml").read_text())["spec"]
    RuntimeEnv(env_vars=yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"])
    env = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["HF_HOME"].startswith("/shared/")  # the image holds no encoder
    words = spec["entrypoint"].split()
    assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    assert (ROOT / words[words.index("--config") + 1]).is_file()


def test_containerfile_copies_what_is_there_and_pins_ray():
    text = (CONFIGS / "Containerfile").read_text()
    [extras] = re.findall(r"^ARG EXTRAS=(.+)$", text, re.M)
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= given["optional-dependencies"].keys()
    assert '".[$EXTRAS]"' in text
    assert f"rayproject/ray:{RAY}-" in text
    for line in re.findall(r"^COPY --chown=\S+ (.+)$", text, re.M):
        assert all((ROOT / source).exists() for source in line.split()[:-1])


def test_metrics_of_several_nodes_become_one_text():
    first = (
        "# HELP ray_as2ray_tokens_total Tokens.\n# TYPE ray_as2ray_tokens_total counter\n"
        'ray_as2ray_tokens_total{node="a"} 1\n# HELP ray_other x\nray_other 3\n'
    )
    merged = metrics.merge_metrics([first, first.replace('"a"} 1', '"b"} 2'), ""])
    assert merged.splitlines() == [
        "# HELP ray_as2ray_tokens_total Tokens.",
        "# TYPE ray_as2ray_tokens_total counter",
        'ray_as2ray_tokens_total{node="a"} 1',
        'ray_as2ray_tokens_total{node="b"} 2',
    ]


class Cut(BaseHTTPRequestHandler):
    """An agent that ends in the middle of its answer."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "100")
        self.end_headers()
        self.wfile.write(b"# HELP")

    def log_message(self, *_):
        pass


def test_a_node_that_ends_while_it_tells_its_metrics_is_left_out():
    with HTTPServer(("127.0.0.1", 0), Cut) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert metrics._scrape(f"127.0.0.1:{server.server_address[1]}") == ""
        thread.join()


def test_autoscaling_cluster_is_one_that_ray_takes_and_its_nodes_hold_the_recipes_plans():
    found = yaml.safe_load((CONFIGS / "autoscaling.yaml").read_text())
    validate_config(prepare_config(found))
    for commands in (found["head_start_ray_commands"], found["worker_start_ray_commands"]):
        assert commands[0] == "ray stop"  # or a second `ray up` finds Ray running and fails
        assert "RAY_AUTH_MODE=token" in commands[1]
    assert "~/.ray/auth_token" in found["file_mounts"]  # without it such a Ray does not start
    types = found["available_node_types"]
    held = [kind["resources"] for kind in types.values() for _ in range(kind.get("max_workers", 0))]
    for path in sorted((ROOT / "pipelines/recipes").glob("*.yaml")):
        plan = yaml.safe_load(path.read_text())["profiles"]["cluster"]
        check_capacity(WorkersConfig(**plan), held)
