"""The Kubernetes manifests: as schemas want them, with settings and flags that exist, and safe."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from orca_dist.cli.main import commands
from orca_dist.cli.settings import load_settings
from orca_dist.cli.usage import parse
from orca_dist.client import healthcheck
from orca_dist.config import DeviceKind
from tests.fixtures.kustomized import Object, kustomized

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cluster" / "k8s"
VARIANTS = [FOLDER / "base", FOLDER / "overlays" / "gpu"]
SCHEMA = json.loads((ROOT / "tests/fixtures/raycluster_schema.json").read_text())
KUBERNETES = "1.31"
SECRETS = {"orca-api-keys", "orca-tls", "orca-ray-token"}
GENERATED = re.compile(r"orca-config-[a-z0-9]{10}")  # kubectl adds a hash of the contents


@pytest.fixture(params=VARIANTS, ids=lambda folder: folder.name)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return kustomized(request.param)


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def templates(objects: list[Object]) -> dict[str, Object]:
    """Pod templates by a name for them."""
    (ray,), (server,) = of_kind(objects, "RayCluster"), of_kind(objects, "Deployment")
    groups = {each["groupName"]: each["template"] for each in ray["spec"]["workerGroupSpecs"]}
    return {
        "head": ray["spec"]["headGroupSpec"]["template"],
        "server": server["spec"]["template"],
        **groups,
    }


def containers(template: Object) -> list[Object]:
    return [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]


def settings_file(objects: list[Object], tmp_path: Path) -> Path:
    (config,) = of_kind(objects, "ConfigMap")
    path = tmp_path / "orca.yaml"
    path.write_text(config["data"]["orca.yaml"])
    return path


# ---- schemas -----------------------------------------------------------


def test_kinds_of_kubernetes(objects: list[Object]) -> None:
    for each in objects:
        if not each["apiVersion"].startswith("ray.io/"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_ray_cluster(objects: list[Object]) -> None:
    (ray,) = of_kind(objects, "RayCluster")
    jsonschema.validate(ray, SCHEMA)


def test_pod_templates_of_the_ray_cluster(objects: list[Object]) -> None:
    for name, template in templates(objects).items():
        wrapped = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": template,
        }
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)


def test_a_wrong_field_is_found() -> None:
    (ray,) = of_kind(kustomized(VARIANTS[0]), "RayCluster")
    ray["spec"]["workerGroups"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ray, SCHEMA)


@pytest.mark.parametrize("folder", VARIANTS, ids=lambda folder: folder.name)
def test_kubectl_makes_the_same_of_a_folder(folder: Path) -> None:
    """Where it is installed; else what stands in for it here is all there is."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = {_key(each): _plain(each) for each in yaml.safe_load_all(done.stdout)}
    assert theirs == {_key(each): _plain(each) for each in kustomized(folder)}


def _key(each: Object) -> tuple[str, str]:
    return each["kind"], GENERATED.sub("orca-config", each["metadata"]["name"])


def _plain(each: Object) -> str:
    return GENERATED.sub("orca-config", json.dumps(each, sort_keys=True))


# ---- settings and flags ------------------------------------------------


def test_settings_exist_and_go_together(objects: list[Object], tmp_path: Path) -> None:
    settings = load_settings({}, settings_file(objects, tmp_path))
    settings.engine.check()
    settings.server.check()


def test_there_is_a_place_for_every_stage(objects: list[Object], tmp_path: Path) -> None:
    engine = load_settings({}, settings_file(objects, tmp_path)).engine
    (ray,) = of_kind(objects, "RayCluster")
    places = 0
    for group in ray["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        cpus = float(group["rayStartParams"].get("num-cpus") or limits["cpu"])
        each = int(cpus // (engine.cpus_per_stage or 1))
        if engine.device is DeviceKind.CUDA:
            each = min(each, int(limits["nvidia.com/gpu"]))
        places += group["replicas"] * each
    assert places == engine.stages
    assert ray["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def _shell_commands(objects: list[Object]) -> Iterator[list[str]]:
    """Words of every command line that pods run through a shell."""
    for template in templates(objects).values():
        for container in containers(template):
            for script in container.get("args", []):
                for line in script.replace("\\\n", " ").splitlines():
                    yield shlex.split(line)


def test_the_server_is_started_with_flags_that_exist(objects: list[Object], tmp_path: Path) -> None:
    config = settings_file(objects, tmp_path)
    lines = [words for words in _shell_commands(objects) if "orca-dist" in words]
    (words,) = lines
    arguments = words[words.index("orca-dist") + 1 :]
    assert arguments[0] == "serve"
    command = parse(commands(load_settings({}, config)), arguments)
    assert command.engine.ray_address == "auto"
    assert str(command.config) == "/etc/orca/config/orca.yaml"


def test_ray_is_started_with_flags_that_exist(objects: list[Object]) -> None:
    from ray.scripts.scripts import cli

    def known(command: str) -> set[str]:
        return {word for parameter in cli.commands[command].params for word in parameter.opts}

    lines = [words[words.index("ray") :] for words in _shell_commands(objects) if "ray" in words]
    assert {line[1] for line in lines} == {"start", "health-check"}
    for line in lines:
        flags = {word for word in line if word.startswith("--")}
        assert flags <= known(line[1])
    (ray,) = of_kind(objects, "RayCluster")
    groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= known("start")


def test_probes_ask_the_health_service(objects: list[Object]) -> None:
    """Of the certificate's name and CA; and a server that recovers is not killed."""
    (server,) = templates(objects)["server"]["spec"]["containers"]
    asked = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        python, flag, module, *arguments = server[name]["exec"]["command"]
        assert (python, flag, module) == ("python", "-m", healthcheck.__name__)
        asked[name] = healthcheck._parser().parse_args(arguments)
        assert server[name]["timeoutSeconds"] > asked[name].timeout_s
    assert [each.live for each in asked.values()] == [False, False, True]
    (service,) = of_kind(objects, "Service")
    assert {each.tls_server_name for each in asked.values()} == {service["metadata"]["name"]}


def test_ray_nodes_are_probed_where_they_listen(objects: list[Object]) -> None:
    """By probes of our own: KubeRay's ask a dashboard that this image has not."""
    (ray,) = of_kind(objects, "RayCluster")
    head, (workers,) = ray["spec"]["headGroupSpec"], ray["spec"]["workerGroupSpecs"]
    for group, port in (
        (head, 6379),
        (workers, int(workers["rayStartParams"]["node-manager-port"])),
    ):
        (container,) = group["template"]["spec"]["containers"]
        assert [each["containerPort"] for each in container["ports"]] == [port]
        for name in ("readinessProbe", "livenessProbe"):
            assert container[name]["tcpSocket"]["port"] == port


def test_there_is_time_to_start_and_to_drain(objects: list[Object], tmp_path: Path) -> None:
    settings = load_settings({}, settings_file(objects, tmp_path))
    pod = templates(objects)["server"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_s + 10
    (server,) = pod["containers"]
    probe = server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= settings.engine.start_timeout_s


# ---- names that have to fit --------------------------------------------


def test_files_that_settings_name_are_mounted(objects: list[Object], tmp_path: Path) -> None:
    server = load_settings({}, settings_file(objects, tmp_path)).server
    (container,) = templates(objects)["server"]["spec"]["containers"]
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    for path in (server.api_keys_file, server.tls_cert, server.tls_key):
        assert path is not None
        assert path.parent in mounted


def test_volumes_are_there_and_used(objects: list[Object]) -> None:
    for template in templates(objects).values():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        used = {m["name"] for each in containers(template) for m in each["volumeMounts"]}
        assert used == set(volumes)
        named = {v["secret"]["secretName"] for v in volumes.values() if "secret" in v}
        assert named <= SECRETS
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        for each in template["spec"]["containers"]:
            places = {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
            assert places["shm"] == "/dev/shm"


def test_selectors_select(objects: list[Object]) -> None:
    """KubeRay puts ray.io/cluster on its pods."""
    labels = {name: each["metadata"]["labels"] for name, each in templates(objects).items()}
    (ray,) = of_kind(objects, "RayCluster")
    for name in set(labels) - {"server"}:
        labels[name] = labels[name] | {"ray.io/cluster": ray["metadata"]["name"]}

    def selected(by: Mapping[str, str]) -> set[str]:
        return {name for name, own in labels.items() if by.items() <= own.items()}

    (service,), (budget,) = of_kind(objects, "Service"), of_kind(objects, "PodDisruptionBudget")
    assert selected(service["spec"]["selector"]) == {"server"}
    assert selected(budget["spec"]["selector"]["matchLabels"]) == set(labels) - {"server"}
    policies = {each["metadata"]["name"]: each for each in of_kind(objects, "NetworkPolicy")}
    parts = policies["orca-parts"]["spec"]["podSelector"]["matchLabels"]
    assert selected(parts) == set(labels)
    clients = policies["orca-clients"]["spec"]["podSelector"]["matchLabels"]
    assert selected(clients) == {"server"}


def test_one_ray_pod_may_be_away(objects: list[Object]) -> None:
    (ray,), (budget,) = of_kind(objects, "RayCluster"), of_kind(objects, "PodDisruptionBudget")
    pods = 1 + sum(group["replicas"] for group in ray["spec"]["workerGroupSpecs"])
    assert budget["spec"]["minAvailable"] == pods - 1


def test_pods_have_no_more_rights_than_they_need(objects: list[Object]) -> None:
    for template in templates(objects).values():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers(template):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(each["resources"])
            environment = {entry["name"]: entry.get("value") for entry in each["env"]}
            assert environment["RAY_AUTH_MODE"] == "token"


def test_ray_is_the_version_that_is_pinned(objects: list[Object]) -> None:
    (ray,) = of_kind(objects, "RayCluster")
    assert f"ray=={ray['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()


def test_no_secret_is_written_down(objects: list[Object]) -> None:
    assert of_kind(objects, "Secret") == []
