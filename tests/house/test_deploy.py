"""docs/deploy: what its files name is there, in the server or beside them. Nothing is built."""

import json
import re
from pathlib import Path

import yaml

from fluxq.cli import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
MANIFESTS = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))]
METRICS = set(re.findall(r'make\(\w+, "(\w+)"', (ROOT / "src/fluxq/serve/metrics.py").read_text(encoding="utf-8")))


def test_every_figure_that_is_named_is_one_of_the_server() -> None:
    pages = [*DEPLOY.iterdir(), ROOT / "docs" / "serving.md"]
    named = {name for page in pages for name in re.findall(r"\bfluxq_([a-z_]+)", page.read_text(encoding="utf-8"))}
    plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} - {"generation"}
    assert len(METRICS) > 15 and plain == METRICS


def test_the_image_serves_as_nobody_and_without_what_makes_checkpoints() -> None:
    last = DOCKERFILE.rpartition("FROM ")[2]
    assert ".[serve,redis]" in DOCKERFILE and "all]" not in DOCKERFILE
    assert "USER 10001" in last and "HEALTHCHECK" in last and "/health" in last
    commands = [*map(json.loads, re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", last, re.MULTILINE))]
    assert commands[0] == ["fluxq", "serve"]


def test_the_image_is_built_of_the_package_alone() -> None:
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    links = {file.name for file in (ROOT / "src" / "fluxq").iterdir() if file.is_symlink()}
    assert copied == {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src", *links}
    assert all((ROOT / name).exists() for name in copied)


def test_options_and_ports_are_the_servers() -> None:
    known = {option: parameter for parameter in cli.commands["serve"].params for option in parameter.opts}
    (pod,) = [each for each in MANIFESTS if each["kind"] == "Deployment"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    for words in (container["args"], json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])):
        assert {word for word in words if word.startswith("--")} <= known.keys()
    assert container["ports"][0]["containerPort"] == known["--port"].default == 8000
    probes = [container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")]
    assert probes == ["/ready", "/health"] and container["securityContext"]["readOnlyRootFilesystem"]
    waits = container["lifecycle"]["preStop"]["exec"]["command"]  # or a balancer asks a port that is closed
    assert waits[0] == "sleep" and int(waits[1]) < pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    volumes = {each["name"] for each in pod["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def test_what_compose_mounts_is_there() -> None:
    mounts = [each for service in COMPOSE["services"].values() for each in service.get("volumes", ())]
    own = [each.partition(":")[0] for each in mounts if each.startswith("./")]
    assert len(own) == 4 and all((DEPLOY / name).is_file() for name in own)
    assert (DEPLOY / COMPOSE["services"]["fluxq"]["build"]["context"]).resolve() == ROOT
    assert json.loads((DEPLOY / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    (scaled,) = [each for each in MANIFESTS if each["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == MANIFESTS[0]["metadata"]["name"]
