"""JSON schemas of the custom resources in deploy/kubernetes: the fields in use.

Their projects publish schemas in their resource definitions only, which no package index has. A
field outside of these is a mistake here, so that a misspelt one is found.
"""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from tests.kubernetes.resolved import Object

Schema = dict[str, Any]


def _record(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema, at_most: int = 64) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": at_most}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
SELECTOR = _record({"matchLabels": LABELS})
RELABEL = _record({"sourceLabels": _list(TEXT), "targetLabel": TEXT}, replacement=TEXT)
RULE = _record(
    {"expr": TEXT},
    record=TEXT,
    alert=TEXT,
    **{"for": DURATION, "labels": LABELS, "annotations": LABELS},
)

SPECS: Mapping[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _record(
        {
            "selector": SELECTOR,
            "endpoints": _list(
                _record({"port": NAME}, interval=DURATION, relabelings=_list(RELABEL))
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _record(
        {"groups": _list(_record({"name": TEXT, "rules": _list(RULE)}))}
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): _record(
        {
            "gatewayClassName": NAME,
            "listeners": _list(_record({"name": NAME, "port": PORT, "protocol": _one_of("HTTP")})),
        }
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _record(
        {
            "parentRefs": _list(_record({"name": NAME})),
            "rules": _list(
                _record(
                    {
                        "backendRefs": _list(
                            _record(
                                {
                                    "group": _one_of("inference.networking.k8s.io"),
                                    "kind": _one_of("InferencePool"),
                                    "name": NAME,
                                }
                            )
                        )
                    },
                    timeouts=_record({}, request=DURATION),
                )
            ),
        }
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _record(
        {
            "selector": SELECTOR,
            "targetPorts": _list(_record({"number": PORT}), at_most=8),
            "endpointPickerRef": _record(
                {"name": NAME, "port": _record({"number": PORT})},
                failureMode=_one_of("FailOpen", "FailClose"),
            ),
        }
    ),
    ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"): _record(
        {"poolRef": _record({"name": NAME})}, priority={"type": "integer"}
    ),
    ("cert-manager.io/v1", "Issuer"): _record(
        {}, selfSigned=_record({}), ca=_record({"secretName": NAME})
    ),
    ("cert-manager.io/v1", "Certificate"): _record(
        {
            "secretName": NAME,
            "issuerRef": _record({"name": NAME, "kind": _one_of("Issuer", "ClusterIssuer")}),
            "privateKey": _record(
                {},
                algorithm=_one_of("RSA", "ECDSA", "Ed25519"),
                size={"type": "integer"},
                encoding=_one_of("PKCS1", "PKCS8"),
                rotationPolicy=_one_of("Never", "Always"),
            ),
        },
        isCA={"type": "boolean"},
        commonName=TEXT,
        dnsNames=_list(TEXT),
        duration=DURATION,
        renewBefore=DURATION,
        usages=_list(_one_of("digital signature", "server auth", "client auth")),
    ),
}
METADATA = _record({"name": NAME}, namespace=NAME, labels=LABELS)


def is_custom(item: Object) -> bool:
    """Whether the object's group is none of Kubernetes' own."""
    return (item["apiVersion"], item["kind"]) in SPECS


def mistakes(item: Object) -> list[str]:
    """What is wrong with a custom resource, one sentence each."""
    schema = _record(
        {
            "apiVersion": TEXT,
            "kind": TEXT,
            "metadata": METADATA,
            "spec": SPECS[item["apiVersion"], item["kind"]],
        }
    )
    found = Draft202012Validator(schema).iter_errors(item)
    return [f"{each.json_path}: {each.message}" for each in found]
