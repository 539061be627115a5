"""Resources that an operator of the cluster defines: what its definition says, and whether one of ours agrees.

`schemas/` holds the schema of each kind, made from the operator's own file, which is under the Apache licence 2.0, by
`python -m tests.deploy.crd_schemas RELEASE FILE...`:

- github.com/ray-project/kuberay v1.7.0, ray-operator/config/crd/bases/ray.io_rayclusters.yaml
- github.com/prometheus-operator/prometheus-operator v0.93.0,
  example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml

Descriptions, status and what only API servers read are left out. So is what Kubernetes itself defines, the templates of
pods: `check` has these validated as Kubernetes'. A field that the definition does not name is refused, where an API
server would drop it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml

_SCHEMAS: Final = Path(__file__).parent / "schemas"
_TEMPLATE: Final = "a template of pods"
_KUBERNETES: Final = "1.33"


def defined() -> dict[str, Path]:
    """Return the schemas, by `GROUP/VERSION KIND`."""
    return {json.loads(path.read_text())["title"]: path for path in sorted(_SCHEMAS.glob("*.json"))}


def kind(resource: Mapping[str, Any]) -> str:
    """Return what a resource is of, by which `defined` knows it."""
    return f"{resource['apiVersion']} {resource['kind']}"


def check(resource: Mapping[str, Any]) -> None:
    """Validate a resource whose kind is one of `defined`.

    Raises:
        jsonschema.ValidationError, kubernetes_validate.ValidationError: it is not as its definition says.
    """
    schema = json.loads(defined()[kind(resource)].read_text())
    validator = jsonschema.Draft4Validator(schema)
    jsonschema.Draft4Validator.check_schema(schema)
    validator.validate(resource)
    for template in templates(resource["spec"]):
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
        kubernetes_validate.validate(wrapped, _KUBERNETES, strict=True)


def templates(value: Any) -> Iterator[Mapping[str, Any]]:
    """Find the templates of pods in a resource's specification."""
    if isinstance(value, list):
        for each in value:
            yield from templates(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "template" and "containers" in each.get("spec", {}):
                yield each
            else:
                yield from templates(each)


def _schema(definition: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the schema of the version of a kind that is stored."""
    specification = definition["spec"]
    (version,) = [each for each in specification["versions"] if each["storage"]]
    schema = _reduced(version["schema"]["openAPIV3Schema"])
    schema["properties"] = {
        **{name: each for name, each in schema["properties"].items() if name != "status"},
        "metadata": {"type": "object"},
    }
    return {
        "title": f"{specification['group']}/{version['name']} {specification['names']['kind']}",
        "description": f"From {source} (Apache License 2.0), reduced by tests/deploy/crd_schemas.py.",
        **schema,
    }


def _reduced(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_reduced(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if properties and "containers" in properties.get("spec", {}).get("properties", {}):
        return {"type": "object", "title": _TEMPLATE}
    made = {
        key: _reduced(each)
        for key, each in schema.items()
        if not key.startswith("x-kubernetes")
        and not (key == "description" and isinstance(each, str))
        and key != "properties"
    }
    if properties is not None:
        made["properties"] = {name: _reduced(each) for name, each in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def main(release: str, files: list[str]) -> None:
    """Write the schema of each definition."""
    for each in files:
        made = _schema(yaml.safe_load(Path(each).read_text()), f"{release}, {Path(each).name}")
        name = f"{made['title'].rpartition(' ')[2].lower()}.json"
        (_SCHEMAS / name).write_text(json.dumps(made, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
