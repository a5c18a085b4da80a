"""The certificates of the component `mtls`: each service has the one of its role, and uses it."""

from collections.abc import Mapping

import pytest

from services.runtime.network.identity import FILES, Role, dns_name, roles_of
from services.scheduler.links.announced import check_announced
from tests.kubernetes.resolved import (
    Object,
    container,
    name,
    of_kind,
    ours,
    pod,
    ports,
    program,
    settings,
)

OVERLAY = "gpu-fleet"
SERVED = {name(each): each for each in ours(OVERLAY)}


def certificates() -> Mapping[str, Object]:
    """The certificates by the Secrets that they fill."""
    return {each["spec"]["secretName"]: each["spec"] for each in of_kind(OVERLAY, "Certificate")}


@pytest.mark.parametrize("service", SERVED)
class TestEveryService:
    def test_mounts_the_certificate_of_its_role(self, service: str) -> None:
        [volume] = [v for v in pod(SERVED[service])["spec"]["volumes"] if v["name"] == "tls"]
        made = certificates()[volume["secret"]["secretName"]]
        assert roles_of(made["dnsNames"]) == {Role(program(SERVED[service]))}
        assert dns_name(None) in made["dnsNames"]
        assert {"server auth", "client auth"} <= set(made["usages"])

    def test_reads_the_files_of_the_mounted_secret(self, service: str) -> None:
        [mount] = [m for m in container(SERVED[service])["volumeMounts"] if m["name"] == "tls"]
        own = settings(OVERLAY, SERVED[service])
        paths = [own[f"FORETOKEN_TLS_{each.upper()}"] for each in FILES]
        files = ("tls.crt", "tls.key", "ca.crt")
        assert paths == [f"{mount['mountPath']}/{file}" for file in files]
        assert own["FORETOKEN_TLS_INSECURE"] == "false"

    def test_probes_its_port_with_the_certificate(self, service: str) -> None:
        """The kubelet's own probes speak plain gRPC, as a gateway's port for clients does."""
        own = container(SERVED[service])
        if service == "gateway":
            assert own["readinessProbe"]["grpc"]["port"] == ports(SERVED[service])["grpc"]
            return
        for probe in ("startupProbe", "readinessProbe"):
            assert "grpc" not in own[probe]
            *command, address = own[probe]["exec"]["command"]
            assert command == ["python", "-m", "services.runtime.healthcheck"]
            assert address == f"127.0.0.1:{ports(SERVED[service])['grpc']}"
        assert "grpc" not in own["livenessProbe"]
        assert own["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}


def test_worker_may_announce_the_name_of_its_pod() -> None:
    announced = settings(OVERLAY, SERVED["worker"])["FORETOKEN_WORKER_ADVERTISE"]
    check_announced(announced, certificates()["worker-tls"]["dnsNames"], "ipv4:10.0.0.7:1")


def test_every_certificate_has_the_authority_of_the_namespace() -> None:
    issuers = {name(each): each["spec"] for each in of_kind(OVERLAY, "Issuer")}
    made = certificates()
    [authority] = [secret for secret, spec in made.items() if spec.get("isCA")]
    for secret, spec in made.items():
        issuer = issuers[spec["issuerRef"]["name"]]
        expected = {"selfSigned": {}} if secret == authority else {"ca": {"secretName": authority}}
        assert issuer == expected
